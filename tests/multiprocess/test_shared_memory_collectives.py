# SPDX-License-Identifier: Apache-2.0
"""Collectives over shared memory against the oracle: every association, operation and type, around chunk borders."""

import re
from dataclasses import replace
from itertools import count, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from detcomm.association import NAMES
from detcomm.transports import shared_group
from detcomm.transports.shared_group import ONESHOT_BYTES
from tests import inputs, launch
from tests.multiprocess.shared_memory_ranks import (
    Case,
    connected,
    expected,
    run_case,
    run_cases,
    wrong_cases,
)

WORLD_SIZES = (2, 3, 4, 5, 7, 8)
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "reduce")
CHUNK_BYTES = 4096


def _check(world_size: int, cases: list[Case], chunk_bytes: int | None = CHUNK_BYTES) -> None:
    received = launch.run(world_size, run_cases, cases, chunk_bytes)
    assert wrong_cases(world_size, cases, received) == []


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_association_at_every_kind_of_size(world_size: int) -> None:
    chunk = CHUNK_BYTES // 4
    oneshot = ONESHOT_BYTES // 4
    sizes = [
        0,
        1,
        world_size - 1,
        world_size + 1,
        chunk - 1,
        chunk,
        chunk + 1,
        oneshot,
        oneshot + 1,
        oneshot + 2 * chunk,
    ]
    seeds = count()
    cases = [
        Case(collective, size, association=association, in_place=(seed := next(seeds)) % 3 == 0, seed=seed)
        for collective, association, size in product(COLLECTIVES, NAMES, sizes)
        if collective != "all_gather" or association == "tree"
    ]
    _check(world_size, cases)


@pytest.mark.parametrize("world_size", [3])
def test_every_operation_on_every_type(world_size: int) -> None:
    dtypes = [dtype for dtype in inputs.DTYPES if dtype not in inputs.COMPLEX]  # complex arrives as its reals
    seeds = count()
    cases = [
        Case(collective, size, dtype, op, association, accumulate=accumulate, in_place=size == 203, seed=next(seeds))
        for dtype in dtypes
        for op in inputs.legal_ops(dtype)
        for collective, size in (("all_reduce", 203), ("all_reduce", 9001), ("reduce_scatter", 2003))
        for association in ("tree", "ring")
        for accumulate in (("float32", "wire") if dtype in ("bfloat16", "float16") else ("float32",))
    ]
    _check(world_size, cases)


def test_chunks_of_the_default_size() -> None:
    sizes = (131072, 131073, 1000003)
    cases = [
        Case(collective, size, dtype, in_place=collective != "reduce_scatter", seed=size)
        for collective in COLLECTIVES
        for size in sizes
        for dtype in ("float32", "bfloat16")
    ]
    _check(3, cases, chunk_bytes=None)


def test_messages_beyond_the_caches() -> None:
    _check(2, [Case(collective, 4 << 20, alignment=4) for collective in COLLECTIVES], chunk_bytes=None)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shared_allocations_give_the_same_bits_also_if_only_some_ranks_have_them(world_size: int) -> None:
    sizes = (100, 9000, 30011)
    everybody = tuple(range(world_size))
    seeds = count()
    cases = [
        Case(collective, size, dtype, op, association, in_place=in_place, seed=next(seeds), shared_on=shared_on)
        for collective, size, association in product(COLLECTIVES, sizes, NAMES)
        for in_place in (False, True)
        for shared_on in (everybody, everybody[1:])
        for dtype, op in (("float32", "sum"), ("bfloat16", "premul_sum"))
        if collective != "all_gather" or (association, op) == ("tree", "sum")
    ]
    _check(world_size, cases)


def test_the_inputs_tell_the_associations_apart() -> None:
    """The negative control: what the oracle expects differs, so running the wrong association would be seen."""
    for world_size in WORLD_SIZES[1:]:
        bits = {
            inputs.bits(expected(Case("all_reduce", 1000, association=name, seed=3), 0, world_size)).tobytes()
            for name in NAMES
        }
        assert len(bits) == (2 if world_size == 3 else 3)  # three leaves have one tree and one chain, the same


_case = st.builds(
    Case,
    collective=st.sampled_from(COLLECTIVES),
    count=st.one_of(st.integers(0, 300), st.integers(0, 30000)),
    dtype=st.sampled_from(("float32", "bfloat16", "float64", "int8")),
    association=st.sampled_from(NAMES),
    ring_chunk_elems=st.integers(1, 500),
    accumulate=st.sampled_from(("float32", "wire")),
    in_place=st.booleans(),
    alignment=st.integers(0, 63),
    seed=st.integers(0, 1000),
)


@pytest.mark.parametrize("world_size", [3, 4])
def test_random_sizes_alignments_and_orders(world_size: int) -> None:
    with launch.Ranks(world_size) as ranks:

        @settings(
            max_examples=25,
            deadline=None,
            phases=(Phase.explicit, Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(_case, min_size=1, max_size=12))
        def check(cases: list[Case]) -> None:
            received = ranks.run(run_cases, cases, CHUNK_BYTES)
            assert wrong_cases(world_size, cases, received) == []

        check()


def _overlapping(rank: int, world_size: int) -> bool:
    """Input and output that share memory in a way that the loops do not expect."""
    from detcomm.association import TREE
    from detcomm.call import Call
    from detcomm.collectives import Collective, DType, ReduceOp

    count = 5000
    with connected(rank, world_size, chunk_bytes=CHUNK_BYTES) as transport:
        memory = np.zeros(count + 3, np.float32)
        memory[:count] = inputs.rank_input("float32", count, rank, world_size, 1)
        call = Call(Collective.ALL_REDUCE, DType.FLOAT32, count, ReduceOp.SUM)
        data = memory.view(np.uint8)
        collectives = transport.native_collectives
        assert collectives is not None
        collectives.run(call, TREE, "float32", data[: 4 * count], data[12:], timeout_s=60.0)
    want = expected(Case("all_reduce", count, seed=1), rank, world_size)
    return np.array_equal(inputs.bits(memory[3:]), inputs.bits(want))


def test_input_and_output_may_overlap_in_any_way() -> None:
    assert launch.run(3, _overlapping) == [True] * 3


def _touched_bytes() -> int:
    """How much of the group's segments this process has used; the heaps of shared tensors are not among them."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            counts = "memfd:detcomm " in line
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def _stage_or_not(rank: int, world_size: int) -> tuple[int, int, int]:
    """Bytes of the segments that are in use before, after a sum of shared tensors, and after one of private memory."""
    shared = Case("all_reduce", 1 << 20, shared_on=tuple(range(world_size)))
    with connected(rank, world_size) as transport:
        run_case(transport, Case("all_reduce", 1))
        touched = [_touched_bytes()]
        for case in (shared, replace(shared, shared_on=())):
            got = run_case(transport, case)
            assert np.array_equal(inputs.bits(got), inputs.bits(expected(case, rank, world_size)))
            touched.append(_touched_bytes())
    return touched[0], touched[1], touched[2]


@pytest.mark.parametrize("world_size", [2, 3])
def test_shared_allocations_are_read_in_place(world_size: int) -> None:
    for before, after_shared, after_private in launch.run(world_size, _stage_or_not):
        # One chunk is, before a rank knows whether all have such memory; all of a message needs both of two buffers.
        assert after_shared - before <= shared_group.CHUNK_BYTES, "more than a chunk was staged"
        assert after_private - before > shared_group.CHUNK_BYTES, "the control: staging would be seen"
