# SPDX-License-Identifier: Apache-2.0
"""Programs whose ranks read each other's memory, run natively on fake GPUs: the oracle's bits, whatever lies where."""

from typing import Any

import numpy as np
import pytest

from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.cuda.bounded_plan import bounded_peer_plans
from detcomm.cuda.peer.layout import Layout
from detcomm.cuda.peer.path import LEAST_STAGING_BYTES
from detcomm.cuda.peer.program import InPlace
from detcomm.errors import UsageError
from detcomm.options import Options
from tests import fake_gpu, host_kernels, inputs, oracle
from tests.fake_peers import Peers

pytestmark = [
    fake_gpu.needs_native,
    pytest.mark.skipif(host_kernels.COMPILER is None, reason="no C++ compiler here"),
]

SCHEDULES = [
    ("tree", "direct"), ("tree", "halving"), ("tree", "oneshot"), ("tree", "binomial"), ("tree", "hierarchical"),
    ("linear", "direct"), ("linear", "oneshot"), ("ring", "ring"), ("ring", "direct"),
]  # fmt: skip


@pytest.mark.parametrize(("world_size", "chunk_bytes"), [(2, 1024), (3, None), (5, 1024), (8, None)])
@pytest.mark.parametrize(("association", "schedule"), SCHEDULES)
def test_all_reduce_has_the_bits_of_the_oracle(
    world_size: int, association: str, schedule: str, chunk_bytes: int | None
) -> None:
    options = Options(association=association, schedule=schedule, ring_chunk_elems=64, chunk_bytes=chunk_bytes)
    count = 3001
    given = inputs.make("bfloat16", count, world_size)
    call = Call(Collective.ALL_REDUCE, DType.BFLOAT16, count, ReduceOp.SUM)
    expected = inputs.bits(oracle.reduce(given, "bfloat16", "sum", association=association, ring_chunk_elems=64))
    peers = Peers(world_size)
    for in_place in (False, True):
        outcome = peers.run(call, options, [inputs.bits(one) for one in given], in_place)
        for output in outcome.outputs:
            assert np.array_equal(output, expected)
        assert not any(name.startswith("nccl") for gpu in outcome.gpus for name, *_ in gpu.calls)
    if world_size > 2:
        other = oracle.reduce(
            given, "bfloat16", "sum", association="tree" if association == "ring" else "ring", ring_chunk_elems=64
        )
        assert not np.array_equal(inputs.bits(other), expected), "these inputs show no order"


@pytest.mark.parametrize("accumulate", ["float32", "wire"])
def test_every_type_and_operation(accumulate: Any) -> None:
    """Half of the ranks' tensors are read where they lie."""
    world_size, count = 4, 131
    peers = Peers(world_size)
    places = [InPlace(rank % 2 == 0, rank % 2 == 0) for rank in range(world_size)]
    options = Options(schedule="halving", chunk_bytes=512, accumulate=accumulate)
    num_calls = 0
    for dtype in inputs.DTYPES:
        if dtype.startswith("complex") or (accumulate == "wire" and dtype not in ("bfloat16", "float16")):
            continue
        for op in inputs.legal_ops(dtype):
            if op == "premul_sum":
                continue
            given = inputs.make(dtype, count, world_size)
            call = Call(Collective.ALL_REDUCE, DType(dtype), count, ReduceOp(op))
            expected = inputs.bits(oracle.reduce(given, dtype, op, accumulate=accumulate))
            data = [inputs.bits(one) for one in given]
            for output in peers.run(call, options, data, in_place=True, symmetric=places).outputs:
                assert np.array_equal(output, expected), f"{dtype} {op}"
            num_calls += 1
    assert num_calls > (60 if accumulate == "float32" else 8)


@pytest.mark.parametrize("block_size", [2, 4])
@pytest.mark.parametrize("schedule", ["hierarchical", "direct", "halving", "oneshot", "binomial"])
def test_what_crosses_blocks_goes_by_nccl_in_the_same_step(schedule: str, block_size: int) -> None:
    world_size, count = 7, 2003
    options = Options(schedule=schedule, chunk_bytes=1024)
    given = inputs.make("bfloat16", count, world_size)
    call = Call(Collective.ALL_REDUCE, DType.BFLOAT16, count, ReduceOp.SUM)
    expected = inputs.bits(oracle.reduce(given, "bfloat16", "sum"))
    outcome = Peers(world_size, block_size).run(call, options, [inputs.bits(one) for one in given], in_place=True)
    assert all(np.array_equal(output, expected) for output in outcome.outputs)
    for gpu, program in zip(outcome.gpus, outcome.programs, strict=True):
        receivers = {args[0] for name, *args in gpu.calls if name == "ncclSend"}
        assert all(peer // block_size != gpu.rank // block_size for peer in receivers)
        assert program.counts.sent_bytes == sum(args[1] for name, *args in gpu.calls if name == "ncclSend")
    assert any(program.counts.peer_bytes and program.counts.sent_bytes for program in outcome.programs)


def test_shards_of_all_lengths_in_place_or_not() -> None:
    counts = (700, 1, 0, 301)
    total = sum(counts)
    peers = Peers(4)
    options = Options(chunk_bytes=1024)
    given = inputs.make("float32", total, 4)
    expected = inputs.bits(oracle.reduce(given, "float32", "avg"))
    for in_place in (False, True):
        scatter = Call(Collective.REDUCE_SCATTER, DType.FLOAT32, total, ReduceOp.AVG, counts)
        shards = peers.run(scatter, options, [inputs.bits(one) for one in given], in_place).outputs
        assert np.array_equal(np.concatenate(shards), expected)
    gather = Call(Collective.ALL_GATHER, DType.FLOAT32, total, None, counts)
    assert all(np.array_equal(whole, expected) for whole in peers.run(gather, options, shards).outputs)


def test_what_cannot_be_cut_short_enough_is_refused_on_all_ranks() -> None:
    call = Call(Collective.ALL_REDUCE, DType.FLOAT32, 1 << 20, ReduceOp.SUM)
    options = Options(schedule="halving")
    enough = bounded_peer_plans(call, range(4), 4, options, 4, 8 << 20)
    assert len({plan.schedule_fingerprint for plan in enough.values()}) == 1
    assert max(Layout(plan, set(range(4)) - {rank}).num_bytes for rank, plan in enough.items()) <= 8 << 20
    with pytest.raises(UsageError, match=r"a rank stages \d+ bytes for its peers in the shortest pieces"):
        bounded_peer_plans(call, [3], 4, options, 4, 1 << 16)


@pytest.mark.parametrize("world_size", [2, 3, 6, 7, 11, 13, 16])
@pytest.mark.parametrize(("association", "schedule"), SCHEDULES)
def test_what_is_chosen_by_itself_has_room_for_every_call(world_size: int, association: str, schedule: str) -> None:
    """For ``cuda_transport=auto`` no call is refused: how much is staged depends on pieces, not on the message."""
    options = Options(association=association, schedule=schedule, ring_chunk_elems=4096)
    count = (1 << 18) // world_size * world_size
    even = (count // world_size,) * world_size
    for collective, op in (
        (Collective.ALL_REDUCE, ReduceOp.SUM), (Collective.REDUCE_SCATTER, ReduceOp.SUM), (Collective.ALL_GATHER, None)
    ):  # fmt: skip
        call = Call(collective, DType.FLOAT32, count, op, None if collective is Collective.ALL_REDUCE else even)
        assert bounded_peer_plans(call, [0], world_size, options, 16, LEAST_STAGING_BYTES)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [("int8", "sum"), ("int64", "min"), ("uint16", "max"), ("uint8", "band"), ("float64", "product"), ("bool", "sum"),
     ("float16", "avg"), ("int32", "avg")],
)  # fmt: skip
def test_every_kind_of_type_is_read_at_the_peers(dtype: str, op: str) -> None:
    """An odd number of elements: parts begin at odd addresses."""
    world_size, count = 3, 1003
    given = inputs.make(dtype, count, world_size)
    expected = inputs.bits(oracle.reduce(given, dtype, op))
    call = Call(Collective.ALL_REDUCE, DType(dtype), count, ReduceOp(op))
    peers = Peers(world_size)
    for schedule in ("direct", "halving", "oneshot"):
        for in_place in (False, True):
            options = Options(schedule=schedule, chunk_bytes=512)
            outcome = peers.run(call, options, [inputs.bits(one) for one in given], in_place)
            for output in outcome.outputs:
                assert np.array_equal(output, expected)
