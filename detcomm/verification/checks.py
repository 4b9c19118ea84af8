# SPDX-License-Identifier: Apache-2.0
"""One guarantee at a time, for one operation on one type. Every rank of the group makes the same calls.

Each check varies one thing and compares bits with the subject's expected ones.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.contributions import contribution, factor
from detcomm.reducers import Reducer
from detcomm.transports.base import Bytes
from detcomm.verification.contract import Contract, Guarantee
from detcomm.verification.record import Records, Row
from detcomm.verification.reference import expected_bits

NUM_RUNS = 3
"""Repetitions of one reduction, with other delays each time."""

_ORDER_MATTERS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM, ReduceOp.PRODUCT)


@dataclass(frozen=True)
class Subject:
    """One operation on one type, on fixed contributions.

    Args:
        contract: ``None`` for a library that promises nothing.
        label: the contract's id, or the library's name.
    """

    contract: Contract | None
    label: str
    op: ReduceOp
    dtype: DType
    count: int
    world_size: int

    def row(self, guarantee: Guarantee) -> Row:
        return self.label, guarantee, self.dtype

    def input(self, rank: int, start: int = 0, stop: int | None = None) -> Bytes:
        """What ``rank`` contributes, at some of the elements."""
        data = _contribution(self.dtype, self.count, rank, self.world_size)
        return self.part(data, start, self.count if stop is None else stop)

    def part(self, data: Bytes, start: int, stop: int) -> Bytes:
        return data[start * self.dtype.itemsize : stop * self.dtype.itemsize]

    def reduce(
        self, reducer: Reducer, collective: Collective, start: int = 0, stop: int | None = None, root: int = 0
    ) -> Bytes:
        """Reduce some of the elements as a message of their own."""
        own_factor = factor(reducer.rank) if self.op is ReduceOp.PREMUL_SUM else None
        data = self.input(reducer.rank, start, stop)
        return reducer.reduce(collective, self.op, self.dtype, data, root=root, factor=own_factor)

    def expected(self, *, first_leaf: int = 0) -> Bytes | None:
        """The promised bits; ``None`` if nothing is promised.

        Args:
            first_leaf: contributions are dealt to the leaves from here on, for the control.
        """
        if self.contract is None:
            return None
        return self._by_contract(self.contract, first_leaf)

    @property
    def order_matters(self) -> bool:
        """Whether another order of the same operations gives other bits of some of the contributions."""
        if self.op is ReduceOp.PRODUCT and self.dtype is DType.FLOAT16:
            return False  # a float32 holds such products so well that hardly one in thousands tells the order
        return self.op in _ORDER_MATTERS and self.dtype.kind in ("float", "complex") and self.world_size > 2

    def _by_contract(self, contract: Contract, first_leaf: int) -> Bytes:
        ranks = [(first_leaf + rank) % self.world_size for rank in range(self.world_size)]
        inputs = [self.input(rank) for rank in ranks]
        factors = [factor(rank) for rank in ranks]
        return expected_bits(contract.association, contract.accumulate, self.op, self.dtype, inputs, factors)


@lru_cache(maxsize=512)
def _contribution(dtype: DType, count: int, rank: int, world_size: int) -> Bytes:
    data = contribution(dtype, count, rank, world_size)
    data.flags.writeable = False
    return data


@dataclass(frozen=True)
class Under:
    """A schedule under which a subject is checked, and what it is able to do.

    Attributes:
        name: for people; empty for what detcomm chooses by itself.
        collectives: which collectives the schedule has.
        num_runs: repetitions.
        is_brief: whether a prefix and a piece stand for all sizes.
    """

    name: str = ""
    collectives: frozenset[Collective] = frozenset(Collective)
    num_runs: int = NUM_RUNS
    is_brief: bool = False

    def tell(self, how: str) -> str:
        return f"{self.name}: {how}" if self.name else how


def check_runs(records: Records, reducer: Reducer, subject: Subject, expected: Bytes, under: Under) -> None:
    """The same reduction again, some ranks late."""
    for run in range(under.num_runs):
        time.sleep(0.001 * ((reducer.rank * 3 + run) % 4))
        result = subject.reduce(reducer, Collective.ALL_REDUCE)
        how = under.tell(f"run {run + 2} of {under.num_runs + 1}")
        records.compare(subject.row(Guarantee.RUN), subject.op, how, result, expected)


def check_sizes(records: Records, reducer: Reducer, subject: Subject, expected: Bytes, under: Under) -> None:
    """Parts of the message as messages of their own: prefixes, and pieces from its midst and its end."""
    count = subject.count
    parts = [(0, 1), (0, 17), (0, count // 2)]
    by_position = subject.contract is not None and subject.contract.by_position
    if not by_position:
        parts += [(1, 8), (count // 3, count // 3 + 129), (count - 5, count)]
    if under.is_brief:
        parts = [parts[2], *parts[4:5]]
    for start, stop in parts:
        result = subject.reduce(reducer, Collective.ALL_REDUCE, start, stop)
        records.compare(
            subject.row(Guarantee.SIZE),
            subject.op,
            under.tell(f"elements [{start},{stop}) alone"),
            result,
            subject.part(expected, start, stop),
            first=start,
            partly=by_position,
        )


def check_compositions(records: Records, reducer: Reducer, subject: Subject, expected: Bytes, under: Under) -> None:
    """Reduce-scatter then all-gather; reduce to one rank then broadcast."""
    row = subject.row(Guarantee.COMPOSITION)
    by_position = subject.contract is not None and subject.contract.by_position
    count = subject.count // subject.world_size * subject.world_size
    if not by_position and under.collectives >= {Collective.REDUCE_SCATTER, Collective.ALL_GATHER}:
        shard = subject.reduce(reducer, Collective.REDUCE_SCATTER, 0, count)
        whole = reducer.all_gather(shard)
        how = under.tell("reduce-scatter, then all-gather")
        records.compare(row, subject.op, how, whole, subject.part(expected, 0, count))
    if Collective.REDUCE not in under.collectives:
        return
    root = subject.world_size - 1
    reduced = subject.reduce(reducer, Collective.REDUCE, root=root)
    if reducer.rank != root:
        reduced = np.zeros_like(expected)
    how = under.tell(f"reduce to rank {root}, then broadcast")
    records.compare(row, subject.op, how, reducer.broadcast(reduced, root), expected, partly=by_position)


def check_once(
    records: Records, reducer: Reducer, subject: Subject, guarantee: Guarantee, how: str, expected: Bytes
) -> None:
    """One all-reduce on a group that differs from the first one in what ``how`` says."""
    result = subject.reduce(reducer, Collective.ALL_REDUCE)
    records.compare(subject.row(guarantee), subject.op, how, result, expected)


def check_control(records: Records, subject: Subject, reference: Contract) -> None:
    """The contributions can fail: dealt to other leaves of the same tree, they give other bits.

    Args:
        reference: the contract by whose tree a library without one is judged.
    """
    if not subject.order_matters:
        return
    bits = [subject._by_contract(subject.contract or reference, first_leaf) for first_leaf in (0, 1)]
    row = subject.row(Guarantee.CONTROL)
    if np.array_equal(bits[0], bits[1]):
        records.fail(row, subject.op, "other additions give the same bits: these inputs show nothing")
    else:
        records.num_checks[row] += 1


def order_of(world_size: int) -> dict[str, Sequence[int]]:
    """Other placements: which process has which rank."""
    processes = list(range(world_size))
    return {
        "ranks dealt in reverse": processes[::-1],
        "ranks dealt round robin": processes[::2] + processes[1::2],
    }
