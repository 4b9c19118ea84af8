# SPDX-License-Identifier: Apache-2.0
"""The schedule: who sends what to whom, and when. Pure data, told lazily, cell by cell.

A *cell* is a set of elements that share one fate: one owner, one element class, hence one tree. A schedule tells the
steps of one cell for all ranks, or for one rank alone; all cells of a call take the same number of steps and advance
together. So a schedule of thousands of ranks is never held in memory, and a proof for each cell is a proof of all.

A *value* is what a transfer carries: the subtree over the leaf positions ``[start, stop)`` of the cell's tree. A leaf
is ``(p, p + 1)``, the result is ``(0, N)``, anything else is a partial.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from detcomm.association import Association
from detcomm.collectives import Collective
from detcomm.errors import ScheduleError

Value = tuple[int, int]


class Transfer(NamedTuple):
    """One value from ``src`` to ``dst``."""

    src: int
    dst: int
    value: Value


class Fold(NamedTuple):
    """Consecutive values, in leaf order, become one value on ``rank``."""

    rank: int
    inputs: tuple[Value, ...]

    @property
    def output(self) -> Value:
        return (self.inputs[0][0], self.inputs[-1][1])


class Step(NamedTuple):
    """Transfers posted together, then folds. What a step writes, no transfer of the same step reads."""

    transfers: tuple[Transfer, ...]
    folds: tuple[Fold, ...] = ()


class Traffic(NamedTuple):
    """Transfers of one cell over all ranks, by what they carry: times the cell's elements, these are bytes."""

    leaves: int = 0
    partials: int = 0
    results: int = 0

    def plus(self, other: "Traffic") -> "Traffic":
        return Traffic(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def num_bytes(self, count: int, leaf_bytes: int, partial_bytes: int) -> int:
        """Bytes on the wire for a cell of ``count`` elements."""
        return count * (leaf_bytes * (self.leaves + self.results) + partial_bytes * self.partials)


@dataclass(frozen=True)
class Cell:
    """Elements with one owner and one tree."""

    association: Association
    world_size: int
    owner: int
    element_class: int = 0

    @property
    def whole(self) -> Value:
        return (0, self.world_size)

    def position(self, rank: int) -> int:
        """Where the contribution of ``rank`` stands among the leaves."""
        if self.association.name != "ring":
            return rank
        return (rank - self.element_class - 1) % self.world_size

    def leaf(self, rank: int) -> Value:
        position = self.position(rank)
        return (position, position + 1)

    def owned_by(self, rank: int) -> Self:
        return replace(self, owner=rank)


class Schedule(ABC):
    """A family of steps for every collective. Knows ranks and values, never bytes.

    A schedule gives two halves and says how a message is dealt to owners; the collectives are composed of these.
    """

    @property
    @abstractmethod
    def text(self) -> str:
        """The schedule in writing, as options spell it: ``staged(2,2)``."""

    @abstractmethod
    def check(self, collective: Collective, association: Association, world_size: int) -> None:
        """Refuse what this schedule cannot implement.

        Raises:
            ScheduleError: naming schedule, association and world size.
        """

    @abstractmethod
    def num_halves_steps(self, world_size: int) -> tuple[int, int]:
        """Steps of the reduce half and of the gather half."""

    @abstractmethod
    def reduce_half(self, cell: Cell, rank: int | None = None) -> Iterator[Step]:
        """From a leaf on each rank to the result on the owner; only what concerns ``rank``, if given."""

    @abstractmethod
    def gather_half(self, cell: Cell, rank: int | None = None) -> Iterator[Step]:
        """From the result on the owner to the result on every rank."""

    @abstractmethod
    def half_traffic(self, cell: Cell) -> tuple[Traffic, Traffic]:
        """The closed formula of what the two halves send."""

    def owners(self, collective: Collective, world_size: int, root: int) -> Sequence[int]:
        """The ranks among which the message of an all-reduce or a reduce is dealt."""
        return range(world_size)

    def num_steps(self, collective: Collective, world_size: int) -> int:
        """Steps of every cell of a call."""
        if world_size == 1:
            return 0
        reduce_steps, gather_steps = self.num_halves_steps(world_size)
        return {
            Collective.ALL_REDUCE: reduce_steps + gather_steps,
            Collective.REDUCE_SCATTER: reduce_steps,
            Collective.ALL_GATHER: gather_steps,
            Collective.REDUCE: reduce_steps + 1,
        }[collective]

    def steps(self, collective: Collective, cell: Cell, root: int = 0, rank: int | None = None) -> Iterator[Step]:
        """The steps of one cell of a collective: always ``num_steps`` of them, some may be empty."""
        if cell.world_size == 1:
            return
        if collective.reduces:
            yield from self.reduce_half(cell, rank)
        if collective in (Collective.ALL_REDUCE, Collective.ALL_GATHER):
            yield from self.gather_half(cell, rank)
        if collective is Collective.REDUCE:
            yield forward(cell, root, rank)

    def traffic(self, collective: Collective, cell: Cell, root: int = 0) -> Traffic:
        """The closed formula of what the steps of one cell send, over all ranks."""
        if cell.world_size == 1:
            return Traffic()
        reduce_traffic, gather_traffic = self.half_traffic(cell)
        total = reduce_traffic if collective.reduces else Traffic()
        if collective in (Collective.ALL_REDUCE, Collective.ALL_GATHER):
            total = total.plus(gather_traffic)
        if collective is Collective.REDUCE:
            total = total.plus(Traffic(results=int(cell.owner != root)))
        return total


def forward(cell: Cell, dst: int, rank: int | None = None) -> Step:
    """One step: the result goes from the owner to ``dst``, if they differ."""
    if cell.owner == dst or (rank is not None and rank not in (cell.owner, dst)):
        return Step(())
    return Step((Transfer(cell.owner, dst, cell.whole),))


def refuse(schedule: Schedule, association: Association, why: str) -> ScheduleError:
    """The error for a pair of schedule and association that do not go together."""
    return ScheduleError(f"schedule {schedule.text} does not implement association {association.name}: {why}")
