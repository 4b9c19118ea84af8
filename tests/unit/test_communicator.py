# SPDX-License-Identifier: Apache-2.0
"""The communicator over loopback: the promised bits of every collective, wherever input and output lie."""

import time

import numpy as np
import pytest

from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.communicator import Communicator
from detcomm.options import Options
from detcomm.transports.base import Bytes
from tests import inputs, oracle
from tests.unit.communicator_ranks import COUNT, PATIENCE_S, all_reduce, run_ranks, untouched

SCHEDULES = [
    ("tree", "auto"),
    ("tree", "oneshot"),
    ("tree", "direct"),
    ("tree", "halving"),
    ("tree", "hierarchical"),
    ("tree", "binomial"),
    ("linear", "direct"),
    ("ring", "ring"),
    ("ring", "auto"),
]


@pytest.mark.parametrize(("association", "schedule"), SCHEDULES)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, 8])
def test_all_reduce_has_the_promised_bits(world_size: int, in_place: bool, association: str, schedule: str) -> None:
    contributions = inputs.make("bfloat16", COUNT, world_size, seed=world_size)
    options = Options(association=association, schedule=schedule, ring_chunk_elems=5, chunk_bytes=128)
    expected = oracle.reduce(contributions, "bfloat16", "avg", association=association, ring_chunk_elems=5)

    def body(communicator: Communicator) -> Bytes:
        for _ in range(2):  # the second time the plan comes from the cache
            own = inputs.bits(contributions[communicator.rank]).copy()
            output = own if in_place else untouched(own.size)
            call = all_reduce(op=ReduceOp.AVG, dtype=DType.BFLOAT16)
            communicator.run(call, own, output, timeout_s=PATIENCE_S)
        return output

    for output in run_ranks(world_size, body, options):
        np.testing.assert_array_equal(output, inputs.bits(expected))


def test_another_association_gives_other_bits() -> None:
    contributions = inputs.make("float32", COUNT, 5, seed=5)

    def result(association: str) -> bytes:
        def body(communicator: Communicator) -> bytes:
            own = inputs.bits(contributions[communicator.rank]).copy()
            communicator.run(all_reduce(), own, own, timeout_s=PATIENCE_S)
            return own.tobytes()

        (bits,) = set(run_ranks(5, body, Options(association=association, ring_chunk_elems=5)))
        return bits

    assert len({result(association) for association in ("tree", "linear", "ring")}) == 3


def test_timing_does_not_reach_the_bits() -> None:
    contributions = inputs.make("float32", COUNT, 5, seed=6)
    results = set()
    for seed in range(4):
        dice = np.random.default_rng(seed)
        pauses = dice.random((5, 64)) * 0.002

        def body(communicator: Communicator) -> bytes:
            own = inputs.bits(contributions[communicator.rank]).copy()
            communicator.run(all_reduce(), own, own, timeout_s=PATIENCE_S)
            return own.tobytes()

        options = Options(schedule="halving", chunk_bytes=64)
        results |= set(
            run_ranks(5, body, options, delay=lambda rank, number, p=pauses: time.sleep(p[rank][number % 64]))
        )
    assert len(results) == 1


# Where output may lie in the memory of the input: apart, at the own shard, at the start, one element further.
@pytest.mark.parametrize("layout", ["apart", "own shard", "start", "shifted"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_reduce_scatter_into_any_part_of_its_input(world_size: int, layout: str) -> None:
    shard_counts = tuple(3 * rank % 7 + 5 for rank in range(world_size))
    count = sum(shard_counts)
    contributions = inputs.make("float32", count, world_size, seed=7)
    call = Call(Collective.REDUCE_SCATTER, DType.FLOAT32, count, ReduceOp.SUM, shard_counts=shard_counts)
    expected = inputs.bits(oracle.reduce(contributions, "float32", "sum"))

    def body(communicator: Communicator) -> Bytes:
        rank = communicator.rank
        size, begin = 4 * shard_counts[rank], 4 * call.shard_starts[rank]
        room = np.zeros(4 * count + 64, dtype=np.uint8)
        own = room[: 4 * count]
        own[:] = inputs.bits(contributions[rank])
        start = {"apart": 4 * count, "own shard": begin, "start": 0, "shifted": begin + 4}[layout]
        output = room[start : start + size]
        communicator.run(call, own, output, timeout_s=PATIENCE_S)
        return output

    for rank, output in enumerate(run_ranks(world_size, body)):
        begin = 4 * call.shard_starts[rank]
        np.testing.assert_array_equal(output, expected[begin : begin + 4 * shard_counts[rank]])


@pytest.mark.parametrize("layout", ["apart", "own shard", "start", "shifted"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_all_gather_from_any_part_of_its_output(world_size: int, layout: str) -> None:
    shard_counts = tuple(5 * rank % 4 + 3 for rank in range(world_size))  # bytes
    count = sum(shard_counts)
    call = Call(Collective.ALL_GATHER, DType.UINT8, count, shard_counts=shard_counts)
    whole = np.arange(1, count + 1, dtype=np.uint8)

    def body(communicator: Communicator) -> Bytes:
        rank = communicator.rank
        begin, size = call.shard_starts[rank], shard_counts[rank]
        room = np.zeros(count + 64, dtype=np.uint8)
        start = {"apart": count, "own shard": begin, "start": 0, "shifted": begin + 1}[layout]
        own = room[start : start + size]
        own[:] = whole[begin : begin + size]
        communicator.run(call, own, room[:count], timeout_s=PATIENCE_S)
        return room[:count]

    for output in run_ranks(world_size, body):
        np.testing.assert_array_equal(output, whole)


@pytest.mark.parametrize("world_size", [3, 4, 5])
def test_reduce_writes_on_the_root_alone(world_size: int) -> None:
    contributions = inputs.make("float16", COUNT, world_size, seed=8)
    expected = inputs.bits(oracle.reduce(contributions, "float16", "sum"))
    for root in range(world_size):
        call = Call(Collective.REDUCE, DType.FLOAT16, COUNT, ReduceOp.SUM, root=root)

        def body(communicator: Communicator, call: Call = call) -> Bytes:
            own = inputs.bits(contributions[communicator.rank]).copy()
            before = own.copy()
            if communicator.rank == call.root:
                communicator.run(call, own, own, timeout_s=PATIENCE_S)
                return own
            communicator.run(call, own, own[:0], timeout_s=PATIENCE_S)
            np.testing.assert_array_equal(own, before)
            return own

        np.testing.assert_array_equal(run_ranks(world_size, body)[root], expected)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_premul_sum_takes_a_factor_from_each_rank(world_size: int, in_place: bool) -> None:
    factors = inputs.factors(world_size)
    contributions = inputs.make("bfloat16", COUNT, world_size, seed=9)
    expected = inputs.bits(oracle.reduce(contributions, "bfloat16", "premul_sum", factors=factors))

    def body(communicator: Communicator) -> Bytes:
        own = inputs.bits(contributions[communicator.rank]).copy()
        before = own.copy()
        output = own if in_place else untouched(own.size)
        call = all_reduce(op=ReduceOp.PREMUL_SUM, dtype=DType.BFLOAT16)
        communicator.run(call, own, output, factor=factors[communicator.rank], timeout_s=PATIENCE_S)
        assert in_place or np.array_equal(own, before), "the input belongs to the caller"
        return output

    for output in run_ranks(world_size, body):
        np.testing.assert_array_equal(output, expected)


def test_a_world_of_one_keeps_every_bit() -> None:
    nans = np.array([0x7F800001, 0xFFC12345, 0x80000000, 1], dtype=np.uint32).view(np.uint8)

    def body(communicator: Communicator) -> Bytes:
        output = untouched(16)
        communicator.run(all_reduce(4, ReduceOp.AVG), nans, output, timeout_s=PATIENCE_S)
        return output

    np.testing.assert_array_equal(run_ranks(1, body)[0], nans)
