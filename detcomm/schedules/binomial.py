# SPDX-License-Identifier: Apache-2.0
"""Reduce to rank 0 along a binomial tree and broadcast back: few messages, for few bytes in a large world.

    N = 6       0 <-- 1    2 <-- 3    4 <-- 5        distance 1
                0 <------- 2                         distance 2
                0 <------------------ 4              distance 4

Ranks are never rotated for another root, since that would build another tree: the result is forwarded.

Steps: ceil(log2 N) each half, one more where the result is forwarded.  Sent per rank: up to log2(N) S.
Association: ``tree``.  Source: Thakur, Rabenseifner, Gropp 2005, section 3.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from detcomm.association import Association
from detcomm.collectives import Collective
from detcomm.schedule import Cell, Schedule, Step, Traffic, forward, refuse
from detcomm.schedules.staged import halving


@dataclass(frozen=True)
class Binomial(Schedule):
    """The halving schedule with everything owned by rank 0."""

    @property
    def text(self) -> str:
        return "binomial"

    def check(self, collective: Collective, association: Association, world_size: int) -> None:
        if collective.reduces and association.name != "tree" and world_size > 2:
            raise refuse(self, association, "it adds neighbouring blocks")
        if collective.reduces and association.name == "ring" and world_size == 2:
            raise refuse(self, association, "it would swap the operands of one owner")

    def owners(self, collective: Collective, world_size: int, root: int) -> Sequence[int]:
        return (0,)

    def num_halves_steps(self, world_size: int) -> tuple[int, int]:
        levels = (world_size - 1).bit_length()
        return levels, levels

    def num_steps(self, collective: Collective, world_size: int) -> int:
        levels = (world_size - 1).bit_length()
        if world_size == 1:
            return 0
        return 2 * levels if collective is Collective.ALL_REDUCE else levels + 1

    def reduce_half(self, cell: Cell, rank: int | None = None) -> Iterator[Step]:
        return halving(cell.world_size).reduce_half(cell.owned_by(0), rank)

    def gather_half(self, cell: Cell, rank: int | None = None) -> Iterator[Step]:
        for step in halving(cell.world_size).gather_half(cell.owned_by(0), rank):
            # An all-gather's owner holds the result already; it only passes it on.
            yield Step(tuple(transfer for transfer in step.transfers if transfer.dst != cell.owner))

    def half_traffic(self, cell: Cell) -> tuple[Traffic, Traffic]:
        return halving(cell.world_size).half_traffic(cell.owned_by(0))

    def steps(self, collective: Collective, cell: Cell, root: int = 0, rank: int | None = None) -> Iterator[Step]:
        if cell.world_size == 1:
            return
        if collective is Collective.ALL_GATHER:
            yield forward(cell, 0, rank)
        else:
            yield from self.reduce_half(cell, rank)
        if collective in (Collective.ALL_REDUCE, Collective.ALL_GATHER):
            yield from self.gather_half(cell, rank)
        else:
            yield forward(cell.owned_by(0), self._receiver(collective, cell, root), rank)

    def traffic(self, collective: Collective, cell: Cell, root: int = 0) -> Traffic:
        if cell.world_size == 1:
            return Traffic()
        reduce_traffic, gather_traffic = self.half_traffic(cell)
        if collective is Collective.ALL_REDUCE:
            return reduce_traffic.plus(gather_traffic)
        if collective is Collective.ALL_GATHER:
            return gather_traffic  # one more on the way to rank 0, one less on the way back
        return reduce_traffic.plus(Traffic(results=int(self._receiver(collective, cell, root) != 0)))

    @staticmethod
    def _receiver(collective: Collective, cell: Cell, root: int) -> int:
        return root if collective is Collective.REDUCE else cell.owner
