# SPDX-License-Identifier: Apache-2.0
"""The classic ring: the partial sum walks from the rank after the owner round to the owner, then the result on.

    N = 4, the cell owned by rank 1:    2 --> 3 --> 0 --> 1      then      1 --> 2 --> 3 --> 0
                                        x_2   +x_3  +x_0  +x_1             the result

Steps: N-1 each half.  Sent per rank: (N-1)/N of the buffer each half, for 32-bit types.
Association: ``ring``, (((x_{o+1} + x_{o+2}) + ...) + x_o); each rank adds its own part on the right.
Source: Patarasuk and Yuan 2009, section 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from detcomm.association import Association
from detcomm.collectives import Collective
from detcomm.schedule import Cell, Fold, Schedule, Step, Traffic, Transfer, refuse


@dataclass(frozen=True)
class Ring(Schedule):
    """Bandwidth-optimal and neighbour-only; implements the ``ring`` association alone."""

    @property
    def text(self) -> str:
        return "ring"

    def check(self, collective: Collective, association: Association, world_size: int) -> None:
        if collective.reduces and association.name != "ring" and world_size > 1:
            raise refuse(self, association, "a ring builds one left fold for each owner")

    def num_halves_steps(self, world_size: int) -> tuple[int, int]:
        return world_size - 1, world_size - 1

    def reduce_half(self, cell: Cell, rank: int | None = None) -> Iterator[Step]:
        world_size = cell.world_size
        first = cell.owner + 1
        for step in range(world_size - 1):
            src, dst = (first + step) % world_size, (first + step + 1) % world_size
            if rank not in (None, src, dst):
                yield Step(())
                continue
            partial, leaf = (0, step + 1), (step + 1, step + 2)
            folds = (Fold(dst, (partial, leaf)),) if rank in (None, dst) else ()  # bits: own part on the right
            yield Step((Transfer(src, dst, partial),), folds)

    def gather_half(self, cell: Cell, rank: int | None = None) -> Iterator[Step]:
        world_size = cell.world_size
        for step in range(world_size - 1):
            src, dst = (cell.owner + step) % world_size, (cell.owner + step + 1) % world_size
            yield Step((Transfer(src, dst, cell.whole),) if rank in (None, src, dst) else ())

    def half_traffic(self, cell: Cell) -> tuple[Traffic, Traffic]:
        world_size = cell.world_size
        return Traffic(leaves=1, partials=world_size - 2), Traffic(results=world_size - 1)
