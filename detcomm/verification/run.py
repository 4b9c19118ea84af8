# SPDX-License-Identifier: Apache-2.0
"""A whole verification: which groups are made, and what is checked on each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from detcomm.association import Association
from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.errors import ScheduleError
from detcomm.golden_vectors import GoldenCase, cases, numerics_ids
from detcomm.reducers import Examined, Reducer
from detcomm.schedules import parse
from detcomm.transports.base import Bytes
from detcomm.tuning import legal_schedules
from detcomm.verification.checks import (
    Subject,
    Under,
    check_compositions,
    check_control,
    check_once,
    check_runs,
    check_sizes,
    order_of,
)
from detcomm.verification.contract import Contract, Guarantee
from detcomm.verification.record import Records, Verdict, digest_of, merge

_RING_CHUNK_ELEMS = 64
"""Small enough that a message has elements of every class."""

_REFERENCE = Contract(Association("tree"), "float32")

Expected = dict[tuple[ReduceOp, DType], Bytes]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Scope:
    """How much is verified.

    Args:
        associations: which of detcomm's.
        dtypes, ops: which types and operations, as far as they go together.
        count: elements of a message.
        chunk_bytes: piece sizes for the schedules; ``None`` leaves it to tuning.
        precisions: of 16-bit types.
        every_golden_world: golden vectors of each world size up to this one, or of the largest alone.
    """

    associations: tuple[str, ...] = ("tree", "linear", "ring")
    dtypes: tuple[DType, ...] = tuple(DType)
    ops: tuple[ReduceOp, ...] = tuple(ReduceOp)
    count: int = 4099
    chunk_bytes: tuple[int | None, ...] = (None, 2048)
    precisions: tuple[str, ...] = ("float32", "wire")
    every_golden_world: bool = True

    def contracts(self) -> Iterator[Contract]:
        """Each association with each precision."""
        for name in self.associations:
            for accumulate in self.precisions:
                yield Contract(Association(name, _RING_CHUNK_ELEMS), "wire" if accumulate == "wire" else "float32")


QUICK = Scope(
    dtypes=(DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16, DType.FLOAT16, DType.INT32),
    count=1031,
    chunk_bytes=(256,),
    precisions=("float32",),
    every_golden_world=False,
)


def verify(examined: Examined, scope: Scope, say: Say = lambda _: None) -> Verdict:
    """Check everything in the scope. Every rank calls this, and every rank gets the verdict.

    Args:
        say: told what comes next.
    """
    records = Records(examined.rank)
    digests: dict[str, str] = {}
    if "detcomm" not in examined.name:
        _verify_contract(examined, scope, None, records, say)
    else:
        for contract in scope.contracts():
            _verify_contract(examined, scope, contract, records, say)
        for numerics_id in numerics_ids():
            if numerics_id.partition("/")[0] in scope.associations:
                say(f"{numerics_id}: golden vectors")
                digests[numerics_id] = _verify_golden(examined, scope, numerics_id, records)
    return merge(examined, records, digests)


def _verify_contract(examined: Examined, scope: Scope, contract: Contract | None, records: Records, say: Say) -> None:
    label = contract.id if contract else examined.name
    subjects = list(_subjects(examined, scope, contract, label))
    expected: Expected = {}
    own = np.empty(0, np.uint8)
    digests: list[str] = []
    say(f"{label}: run, size, composition")
    with examined.opened(options=contract.options() if contract else None) as reducer:
        assert reducer is not None
        for subject in subjects:
            if examined.rank == 0:
                check_control(records, subject, _REFERENCE)
            own = subject.reduce(reducer, Collective.ALL_REDUCE)
            digests.append(digest_of([own]))
            bits = subject.expected()
            if bits is not None:
                how = f"on {examined.device}"
                records.compare(subject.row(Guarantee.DEVICE), subject.op, how, own, bits)
            bits = expected.setdefault((subject.op, subject.dtype), own if bits is None else bits)
            _check_all(records, reducer, subject, bits, Under())
    _compare_ranks(examined, records, subjects, digests)
    for guarantee, how, order, options in _variations(examined, scope, contract):
        say(f"{label}: {guarantee.value}, {how}")
        under = None
        if contract is not None and guarantee is Guarantee.SCHEDULE:
            able = _collectives_of(options.schedule, contract.association, examined.world_size)
            under = Under(how, able, num_runs=1, is_brief=True)
        with examined.opened(order, options) as reducer:
            assert reducer is not None
            for subject in subjects:
                bits = expected[subject.op, subject.dtype]
                check_once(records, reducer, subject, guarantee, how, bits)
                if under is not None:
                    _check_all(records, reducer, subject, bits, under)


def _check_all(records: Records, reducer: Reducer, subject: Subject, expected: Bytes, under: Under) -> None:
    """What is guaranteed of one group, whatever its schedule."""
    check_runs(records, reducer, subject, expected, under)
    check_sizes(records, reducer, subject, expected, under)
    check_compositions(records, reducer, subject, expected, under)


def _collectives_of(schedule: str, association: Association, world_size: int) -> frozenset[Collective]:
    """The collectives that a schedule has under an association."""

    def has(collective: Collective) -> bool:
        try:
            parse(schedule, world_size).check(collective, association, world_size)
        except ScheduleError:
            return False
        return True

    return frozenset(collective for collective in Collective if has(collective))


def _subjects(examined: Examined, scope: Scope, contract: Contract | None, label: str) -> Iterator[Subject]:
    for dtype in scope.dtypes:
        if contract is not None and not contract.differs_from_float32(dtype):
            continue
        for op in scope.ops:
            if examined.refusal(op, dtype) is None:
                yield Subject(contract, label, op, dtype, scope.count, examined.world_size)


def _compare_ranks(examined: Examined, records: Records, subjects: Sequence[Subject], digests: Sequence[str]) -> None:
    """Whether all ranks received the same bits in the first all-reduce of each subject."""
    told: list[Sequence[str]] = examined.tell(digests)
    for index, subject in enumerate(subjects):
        row = subject.row(Guarantee.RANK)
        if told[0][index] == digests[index]:
            records.num_checks[row] += 1
        else:
            records.fail(row, subject.op, f"digest {digests[index]} here, {told[0][index]} on rank 0")


def _variations(
    examined: Examined, scope: Scope, contract: Contract | None
) -> Iterator[tuple[Guarantee, str, Sequence[int] | None, Any]]:
    """What is varied from group to group: guarantee, how, order of the ranks, options."""
    world_size = examined.world_size
    if contract is not None:
        call = Call(Collective.ALL_REDUCE, DType.FLOAT32, scope.count, ReduceOp.SUM)
        for schedule in legal_schedules(call, contract.association, world_size):
            for chunk_bytes in scope.chunk_bytes:
                pieces = "" if chunk_bytes is None else f" in pieces of {chunk_bytes} bytes"
                options = contract.options(schedule=schedule.text, chunk_bytes=chunk_bytes)
                yield Guarantee.SCHEDULE, schedule.text + pieces, None, options
        if examined.device == "cpu":
            yield Guarantee.PLACEMENT, "over sockets", None, contract.options(transport="gloo")
    for how, order in order_of(world_size).items():
        yield Guarantee.PLACEMENT, how, order, contract.options() if contract else None


def _verify_golden(examined: Examined, scope: Scope, numerics_id: str, records: Records) -> str:
    """Reduce the golden vectors of one id for real; note this rank's digest and return the one it must be."""
    by_world: dict[int, list[GoldenCase]] = {}
    for case in cases(numerics_id):
        if case.world_size <= examined.world_size and case.dtype in scope.dtypes and case.op in scope.ops:
            by_world.setdefault(case.world_size, []).append(case)
    worlds = sorted(by_world) if scope.every_golden_world else sorted(by_world)[-1:]
    results: list[Bytes] = []
    for world_size in worlds:
        first = by_world[world_size][0]
        options = Contract(first.association, first.accumulate).options()
        with examined.opened(range(world_size), options) as reducer:
            if reducer is not None:
                results += [_reduce_golden(reducer, case, records) for case in by_world[world_size]]
    records.digests[numerics_id] = digest_of(results)
    return digest_of(case.expected for world_size in worlds for case in by_world[world_size])


def _reduce_golden(reducer: Reducer, case: GoldenCase, records: Records) -> Bytes:
    result = reducer.reduce(
        Collective.ALL_REDUCE,
        case.op,
        case.dtype,
        case.inputs[reducer.rank],
        factor=case.factors[reducer.rank] if case.factors else None,
    )
    how = f"golden vectors of {case.world_size} ranks"
    records.compare((case.numerics_id, Guarantee.SPEC, case.dtype), case.op, how, result, case.expected)
    return result
