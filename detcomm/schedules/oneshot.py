# SPDX-License-Identifier: Apache-2.0
"""Everybody gathers all leaves and folds locally: one step, for few bytes.

Steps: 1.  Sent per rank: (N-1) S for all-reduce; reduce-scatter, all-gather and reduce are one direct stage.
Association: any, since only leaves travel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from detcomm.association import Association
from detcomm.collectives import Collective
from detcomm.schedule import Cell, Fold, Schedule, Step, Traffic, Transfer
from detcomm.schedules.staged import direct


@dataclass(frozen=True)
class Oneshot(Schedule):
    """All leaves to all ranks, then one fold everywhere."""

    @property
    def text(self) -> str:
        return "oneshot"

    def check(self, collective: Collective, association: Association, world_size: int) -> None:
        """Only leaves travel: every association is implemented."""

    def owners(self, collective: Collective, world_size: int, root: int) -> Sequence[int]:
        return (root if collective is Collective.REDUCE else 0,)

    def num_halves_steps(self, world_size: int) -> tuple[int, int]:
        return 1, 1

    def num_steps(self, collective: Collective, world_size: int) -> int:
        return int(world_size > 1)

    def reduce_half(self, cell: Cell, rank: int | None = None) -> Iterator[Step]:
        return direct(cell.world_size).reduce_half(cell, rank)

    def gather_half(self, cell: Cell, rank: int | None = None) -> Iterator[Step]:
        return direct(cell.world_size).gather_half(cell, rank)

    def half_traffic(self, cell: Cell) -> tuple[Traffic, Traffic]:
        return direct(cell.world_size).half_traffic(cell)

    def steps(self, collective: Collective, cell: Cell, root: int = 0, rank: int | None = None) -> Iterator[Step]:
        if cell.world_size == 1:
            return
        if collective is Collective.ALL_REDUCE:
            yield self._exchange_all(cell, rank)
        elif collective is Collective.ALL_GATHER:
            yield from self.gather_half(cell, rank)
        else:
            yield from self.reduce_half(cell, rank)

    def traffic(self, collective: Collective, cell: Cell, root: int = 0) -> Traffic:
        if cell.world_size == 1:
            return Traffic()
        if collective is Collective.ALL_REDUCE:
            return Traffic(leaves=cell.world_size * (cell.world_size - 1))
        reduce_traffic, gather_traffic = self.half_traffic(cell)
        return reduce_traffic if collective.reduces else gather_traffic

    @staticmethod
    def _exchange_all(cell: Cell, rank: int | None) -> Step:
        ranks = range(cell.world_size)
        transfers = tuple(
            Transfer(src, dst, cell.leaf(src))
            for src in ranks
            for dst in ranks
            if src != dst and rank in (None, src, dst)
        )
        leaves = tuple((position, position + 1) for position in ranks)  # bits: operands in leaf order
        return Step(transfers, tuple(Fold(dst, leaves) for dst in ranks if rank in (None, dst)))
