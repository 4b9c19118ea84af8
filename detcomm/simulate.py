# SPDX-License-Identifier: Apache-2.0
"""One interpreter of schedules over three value domains, and the proof that it gives.

    Text       what a person reads: ((0+1)+(2+3))
    Digests    128 bits a value: thousands of ranks
    Arrays     NumPy float arrays: what an executor must reproduce

For every cell the interpreter checks that each transfer carries a value that its source holds before the step, that
nothing is delivered twice, that what a step writes no transfer of that step reads, that folds take consecutive values
the rank holds, that every rank that should has the promised tree at the end, and that what was sent equals the
schedule's closed formula. It shares no code with the executor.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from detcomm.association import Association, Shape, combine_digests, leaf_digest, split
from detcomm.collectives import Collective
from detcomm.errors import ScheduleError
from detcomm.schedule import Cell, Schedule, Step, Traffic, Value

T = TypeVar("T")


class Domain(Protocol[T]):
    """What values are, in one run of the interpreter."""

    def leaf(self, rank: int) -> T:
        """The contribution of a rank."""

    def fold(self, shape: Shape, operands: Sequence[T]) -> T:
        """Consecutive values, in leaf order, become one."""


class Text:
    """Values are trees in writing."""

    def leaf(self, rank: int) -> str:
        return str(rank)

    def fold(self, shape: Shape, operands: Sequence[str]) -> str:
        if len(operands) == 1:
            return operands[0]
        cut = split(len(operands)) if shape == "tree" else len(operands) - 1
        return f"({self.fold(shape, operands[:cut])}+{self.fold(shape, operands[cut:])})"


class Digests:
    """Values are 128-bit digests of trees. Equal folds are remembered: a direct schedule repeats one for each cell."""

    def __init__(self) -> None:
        self._leaves: dict[int, bytes] = {}
        self._known: dict[tuple[Shape, tuple[bytes, ...]], bytes] = {}

    def leaf(self, rank: int) -> bytes:
        digest = self._leaves.get(rank)
        if digest is None:
            digest = self._leaves[rank] = leaf_digest(rank)
        return digest

    def fold(self, shape: Shape, operands: Sequence[bytes]) -> bytes:
        if len(operands) == 2:
            return combine_digests(shape, list(operands))
        key = (shape, tuple(operands))
        digest = self._known.get(key)
        if digest is None:
            digest = combine_digests(shape, list(operands))
            if len(self._known) < 4096:
                self._known[key] = digest
        return digest


class Arrays:
    """Values are the float arrays themselves, added one by one in the written-out order."""

    def __init__(self, inputs: Sequence[NDArray[Any]]) -> None:
        self._inputs = inputs

    def leaf(self, rank: int) -> NDArray[Any]:
        return self._inputs[rank]

    def fold(self, shape: Shape, operands: Sequence[NDArray[Any]]) -> NDArray[Any]:
        if len(operands) == 1:
            return operands[0]
        cut = split(len(operands)) if shape == "tree" else len(operands) - 1
        left, right = self.fold(shape, operands[:cut]), self.fold(shape, operands[cut:])
        return np.asarray(np.add(left, right))  # bits: one addition, the earlier leaves on the left


@dataclass(frozen=True)
class Proof(Generic[T]):
    """What one cell's run gave: the value on each rank that must have it, and what was sent."""

    results: dict[int, T]
    traffic: Traffic


class _Ranks(Generic[T]):
    """What every rank holds of one cell."""

    def __init__(self, schedule: Schedule, cell: Cell, domain: Domain[T], gathered: bool) -> None:
        self._where = f"{schedule.text}, {cell.association.name}, {cell.world_size} ranks, owner {cell.owner}"
        self._cell = cell
        self._domain = domain
        self._held: dict[tuple[int, Value], T] = {}
        self._order = cell.association.leaf_order(cell.world_size, cell.element_class)
        if gathered:  # an all-gather starts from the owner's result: any value that can be told from others
            self._held[cell.owner, cell.whole] = domain.leaf(cell.owner)
        self.traffic = [0, 0, 0]

    def get(self, rank: int, value: Value, step: int) -> T:
        held = self._held.get((rank, value))
        if held is not None:
            return held
        start, stop = value
        if stop - start == 1 and self._order[start] == rank:
            return self._domain.leaf(rank)
        raise ScheduleError(f"{self._where}, step {step}: rank {rank} does not hold {value}")

    def run(self, index: int, step: Step) -> None:
        whole = self._cell.whole
        arrived = []
        for src, dst, value in step.transfers:
            if src == dst:
                raise ScheduleError(f"{self._where}, step {index}: rank {src} sends {value} to itself")
            if (dst, value) in self._held:
                raise ScheduleError(f"{self._where}, step {index}: rank {dst} receives {value} twice")
            arrived.append(((dst, value), self.get(src, value, index)))
            self.traffic[2 if value == whole else 1 if value[1] - value[0] > 1 else 0] += 1
        before = len(self._held)
        self._held.update(arrived)
        if len(self._held) != before + len(arrived):
            raise ScheduleError(f"{self._where}, step {index}: a value arrives twice")
        folded = []
        for fold in step.folds:
            for left, right in zip(fold.inputs, fold.inputs[1:], strict=False):
                if left[1] != right[0]:
                    raise ScheduleError(f"{self._where}, step {index}: {left} and {right} are not consecutive")
            operands = [self.get(fold.rank, value, index) for value in fold.inputs]
            folded.append(((fold.rank, fold.output), self._domain.fold(self._cell.association.shape, operands)))
        self._held.update(folded)


def simulate(schedule: Schedule, collective: Collective, cell: Cell, domain: Domain[T], root: int = 0) -> Proof[T]:
    """Run the steps of one cell on all ranks.

    Raises:
        ScheduleError: naming schedule, step and rank of the first breach.
    """
    gathered = collective is Collective.ALL_GATHER
    ranks = _Ranks(schedule, cell, domain, gathered)
    num_steps = 0
    for step in schedule.steps(collective, cell, root):
        ranks.run(num_steps, step)
        num_steps += 1
    if num_steps != schedule.num_steps(collective, cell.world_size):
        raise ScheduleError(
            f"{schedule.text}: {num_steps} steps, expected {schedule.num_steps(collective, cell.world_size)}"
        )
    receivers: Iterable[int] = {
        Collective.REDUCE: (root,),
        Collective.REDUCE_SCATTER: (cell.owner,),
    }.get(collective, range(cell.world_size))
    results = {rank: ranks.get(rank, cell.whole, num_steps) for rank in receivers}
    return Proof(results, Traffic(*ranks.traffic))


def cells(
    schedule: Schedule, collective: Collective, association: Association, world_size: int, root: int = 0
) -> Iterator[Cell]:
    """The different cells of a call: each owner and element class that its message has."""
    if collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
        owners: Sequence[int] = range(world_size)
    else:
        owners = schedule.owners(collective, world_size, root)
    if association.name == "ring":
        for element_class in range(world_size):
            owner = element_class if len(owners) == world_size else owners[0]
            yield Cell(association, world_size, owner, element_class)
    else:
        for owner in owners:
            yield Cell(association, world_size, owner)


def prove_cell(schedule: Schedule, collective: Collective, cell: Cell, domain: Digests, root: int = 0) -> Traffic:
    """Prove that one cell ends with the promised tree wherever it should; return what it sends.

    Raises:
        ScheduleError: if an addition, a transfer or the traffic is not what was promised.
    """
    proof = simulate(schedule, collective, cell, domain, root)
    where = f"{schedule.text}, {collective.value}, {cell.world_size} ranks, owner {cell.owner}"
    expected = domain.leaf(cell.owner)  # what an all-gather moves
    if collective.reduces:
        expected = cell.association.digest(cell.world_size, cell.element_class)
    for rank, digest in proof.results.items():
        if digest != expected:
            raise ScheduleError(f"{where}: rank {rank} ends with another tree than {cell.association.name}")
    formula = schedule.traffic(collective, cell, root)
    if proof.traffic != formula:
        raise ScheduleError(f"{where}: sent {proof.traffic}, the formula says {formula}")
    return proof.traffic


def prove(
    schedule: Schedule, collective: Collective, association: Association, world_size: int, root: int = 0
) -> Traffic:
    """Prove that a schedule does the promised additions, for every cell of a call; return what it sends.

    Raises:
        ScheduleError: if an addition, a transfer or the traffic is not what was promised.
    """
    schedule.check(collective, association, world_size)
    domain, total = Digests(), Traffic()
    for cell in cells(schedule, collective, association, world_size, root):
        total = total.plus(prove_cell(schedule, collective, cell, domain, root))
    return total
