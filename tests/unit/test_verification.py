# SPDX-License-Identifier: Apache-2.0
"""Verification passes what keeps the promise and catches each way to break it. Ranks are threads of this process."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from detcomm.association import Association
from detcomm.collectives import DType, ReduceOp, is_legal
from detcomm.contributions import contribution, factor
from detcomm.golden_vectors import cases
from detcomm.reducers import Examined
from detcomm.transports.base import Bytes
from detcomm.verification import Scope, Verdict, verify
from detcomm.verification.contract import Guarantee
from detcomm.verification.reference import expected_bits
from tests import oracle
from tests.in_process_library import Request, examine_by_threads

SCOPE = Scope(
    associations=("tree",),
    dtypes=(DType.FLOAT32, DType.BFLOAT16),
    ops=(ReduceOp.SUM, ReduceOp.MAX),
    count=300,
    chunk_bytes=(256,),
    precisions=("float32",),
    every_golden_world=False,
)
WORLD_SIZE = 4


def _promised(request: Request) -> Bytes:
    """What detcomm does: the association of the group's options."""
    options = request.options
    assert options is not None
    factors = [1.0] * len(request.inputs)
    return expected_bits(options.order, options.accumulate, request.op, request.dtype, request.inputs, factors)


def _verify(reduce: Callable[[Request], Bytes], name: str = "detcomm", scope: Scope = SCOPE) -> Verdict:
    def on_rank(examined: Examined) -> Verdict:
        return verify(examined, scope)

    first, *others = examine_by_threads(WORLD_SIZE, reduce, on_rank, name)
    assert all(verdict == first for verdict in others)
    return first


def _broken(verdict: Verdict) -> set[str]:
    return {guarantee.value for _, guarantee, _ in verdict.num_failures}


@pytest.mark.parametrize("association", ["tree", "linear", "ring"])
def test_what_keeps_its_promise_holds(association: str) -> None:
    verdict = _verify(_promised, scope=replace(SCOPE, associations=(association,)))
    assert verdict.holds, verdict.failures
    assert {guarantee for _, guarantee in verdict.rows()} == set(Guarantee)
    assert all(got == expected for got, expected in verdict.digests.values())
    assert bool(verdict.partly) == (association == "ring")


def _other_tree(request: Request, *, when: bool) -> Bytes:
    if not when:
        return _promised(request)
    order = (*request.inputs[1:], request.inputs[0])
    return expected_bits(Association("tree"), "float32", request.op, request.dtype, order, [1.0] * len(order))


BREACHES: dict[str, tuple[Callable[[Request], Bytes], set[str]]] = {
    "size": (lambda request: _other_tree(request, when=request.inputs[0].size < 600), {"size", "spec"}),
    "placement": (
        lambda request: _other_tree(request, when=request.processes != (0, 1, 2, 3)),
        {"placement"},
    ),
    "schedule": (
        lambda request: _other_tree(request, when=request.options is not None and "binom" in request.options.schedule),
        {"schedule", "run", "size", "composition"},  # of that schedule, as each failure says
    ),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_is_found_where_it_is(breach: str) -> None:
    reduce, expected = BREACHES[breach]
    verdict = _verify(reduce)
    assert not verdict.holds
    assert _broken(verdict) == expected
    failure = verdict.failures[0]
    assert failure.op == "sum"
    assert breach != "schedule" or all("binomial" in failure.how for failure in verdict.failures)
    assert failure.expected != failure.got
    assert failure.expected.startswith("0x")


def test_another_rank_that_sees_other_bits_is_found() -> None:
    verdict = _verify(lambda request: _other_tree(request, when=request.rank == 2))
    assert {"rank", "run", "device", "spec"} <= _broken(verdict)
    assert {failure.rank for failure in verdict.failures if failure.guarantee in ("rank", "run")} == {2}


def test_another_order_everywhere_breaks_the_device_and_the_specification() -> None:
    verdict = _verify(lambda request: _other_tree(request, when=True))
    assert {"device", "spec"} <= _broken(verdict)
    assert "rank" not in _broken(verdict)


def test_a_library_without_a_promise_is_compared_with_itself() -> None:
    """Its order is another one, but always the same: nothing is held against it."""

    def fixed(request: Request) -> Bytes:
        return expected_bits(Association("linear"), "wire", request.op, request.dtype, request.inputs, [1.0] * 4)

    verdict = _verify(fixed, name="other")
    assert verdict.holds, verdict.failures
    assert not verdict.digests
    assert {guarantee.value for _, guarantee in verdict.rows()} == {
        "rank",
        "run",
        "size",
        "composition",
        "placement",
        "control",
    }

    def by_size(request: Request) -> Bytes:
        count = request.inputs[0].size // request.dtype.itemsize
        ring = Association("ring", -(-count // 4))
        return expected_bits(ring, "wire", request.op, request.dtype, request.inputs, [1.0] * 4)

    assert _broken(_verify(by_size, name="other")) == {"size"}


@pytest.mark.parametrize("world_size", [3, 4, 5, 8])
def test_controls_show_that_the_contributions_can_fail(world_size: int) -> None:
    for dtype in (DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16, DType.FLOAT16, DType.COMPLEX64):
        inputs = [contribution(dtype, 1031, rank, world_size) for rank in range(world_size)]
        factors = [factor(rank) for rank in range(world_size)]
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM, ReduceOp.PRODUCT):
            if not is_legal(op, dtype) or (op is ReduceOp.PRODUCT and dtype is DType.FLOAT16):
                continue
            tree = expected_bits(Association("tree"), "float32", op, dtype, inputs, factors)
            turned = expected_bits(
                Association("tree"), "float32", op, dtype, inputs[1:] + inputs[:1], factors[1:] + factors[:1]
            )
            assert not np.array_equal(tree, turned), (dtype, op)


def test_contributions_do_not_depend_on_the_length() -> None:
    for dtype in DType:
        long, short = (contribution(dtype, count, 1, 3) for count in (100, 10))
        assert np.array_equal(long[: short.size], short), dtype


def test_the_reference_gives_the_golden_bits() -> None:
    for case in cases():
        result = expected_bits(
            case.association, case.accumulate, case.op, case.dtype, case.inputs, case.factors or [1.0] * 8
        )
        assert np.array_equal(result, case.expected), str(case)


def test_the_reference_agrees_with_the_oracle_on_these_contributions() -> None:
    for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.INT16):
        inputs = [contribution(dtype, 500, rank, 5) for rank in range(5)]
        arrays = [data.view(oracle.storage(dtype.value)) for data in inputs]
        for name in ("tree", "linear", "ring"):
            association = Association(name, 7)
            mine = expected_bits(association, "float32", ReduceOp.SUM, dtype, inputs, [])
            theirs = oracle.reduce(arrays, dtype.value, "sum", association=name, ring_chunk_elems=7)
            assert np.array_equal(mine, theirs.view(np.uint8)), (dtype, name)
