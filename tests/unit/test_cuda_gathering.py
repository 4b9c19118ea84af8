# SPDX-License-Identifier: Apache-2.0
"""What NCCL gathers in place of a plan's own messages: the same bits, and the bytes of the formulas."""

import numpy as np
import pytest

from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.cuda.bounded_plan import bounded_plan
from detcomm.options import Options
from tests import fake_gpu, fake_gpu_world, inputs, oracle

pytestmark = fake_gpu.needs_native


@pytest.mark.parametrize("world_size", [2, 3, 5, 7, 8])
@pytest.mark.parametrize("association", ["tree", "linear"])
@pytest.mark.parametrize(("count", "in_place"), [(5 * 7 * 8 * 9 * 16, False), (20_011, True)])
def test_results_may_be_gathered_by_nccl(
    world_size: int, association: str, count: int, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several pieces and a rest that cannot be dealt evenly: the oracle's bits, and the bytes of the formula."""
    fake_gpu_world.gather_results_always(monkeypatch)
    given = inputs.make("bfloat16", count, world_size)
    call = Call(Collective.ALL_REDUCE, DType.BFLOAT16, count, ReduceOp.AVG)
    options = Options(association=association, chunk_bytes=20_000)
    outputs, gpus, programs = fake_gpu_world.run(call, options, [inputs.bits(one) for one in given], in_place)
    expected = inputs.bits(oracle.reduce(given, "bfloat16", "avg", association=association))
    for output in outputs:
        assert np.array_equal(output, expected)
    num_pieces = -(-(count // (32 * world_size)) // (10_000 // (32 * world_size)))
    even_bytes = 2 * (count // (32 * world_size)) * 32 * world_size
    sent = 2 * even_bytes // world_size + (2 * count - even_bytes)
    for gpu, program in zip(gpus, programs, strict=True):
        names = [name for name, *_ in gpu.calls]
        assert names.count("ncclAllGather") == num_pieces
        assert names.count("ncclGroupStart") == max(num_pieces, 1)
        assert program.counts.num_groups == num_pieces + max(num_pieces, 1)
        assert program.counts.sent_bytes == program.plan.sent_bytes == (world_size - 1) * sent


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize("association", ["tree", "linear", "ring"])
@pytest.mark.parametrize(("count", "in_place"), [(64, False), (1003, True)])
def test_inputs_of_short_messages_are_gathered_by_nccl(
    world_size: int, association: str, count: int, in_place: bool
) -> None:
    """One gather and one fold: the oracle's bits, whether rows in scratch are aligned or not."""
    given = inputs.make("bfloat16", count, world_size)
    call = Call(Collective.ALL_REDUCE, DType.BFLOAT16, count, ReduceOp.AVG)
    options = Options(association=association)
    outputs, gpus, programs = fake_gpu_world.run(call, options, [inputs.bits(one) for one in given], in_place)
    expected = inputs.bits(oracle.reduce(given, "bfloat16", "avg", association=association))
    for output, gpu, program in zip(outputs, gpus, programs, strict=True):
        assert np.array_equal(output, expected)
        assert [name for name, *_ in gpu.calls] == ["cuCtxSetCurrent", "ncclAllGather", "cuLaunchKernel"]
        assert program.counts.sent_bytes == program.plan.sent_bytes == (world_size - 1) * 2 * count
        assert program.plan.scratch_bytes == world_size * 2 * count


@pytest.mark.parametrize(
    ("count", "options", "block_size"),
    [
        (64, Options(association="ring", ring_chunk_elems=8), 1),  # packed
        (1 << 12, Options(), 1),  # longer
        (64, Options(), 4),  # on one host
        (64, Options(schedule="oneshot"), 1),  # by name
    ],
)
def test_other_inputs_stay_messages(count: int, options: Options, block_size: int) -> None:
    call = Call(Collective.ALL_REDUCE, DType.FLOAT32, count, ReduceOp.SUM)
    for rank in range(4):
        assert all(step.gather is None for step in bounded_plan(call, rank, 4, options, block_size).steps)


def test_an_all_gather_of_even_shards_is_one_of_nccl() -> None:
    for shards, is_one in [((77,) * 4, True), ((77, 76, 78, 77), False)]:
        call = Call(Collective.ALL_GATHER, DType.UINT8, sum(shards), None, shards)
        given = [np.full(size, rank + 1, np.uint8) for rank, size in enumerate(shards)]
        outputs, gpus, programs = fake_gpu_world.run(call, Options(), given)
        for output in outputs:
            assert np.array_equal(output, np.concatenate(given))
        for gpu, program in zip(gpus, programs, strict=True):
            names = [name for name, *_ in gpu.calls]
            assert (names == ["cuCtxSetCurrent", "ncclAllGather"]) == is_one
            assert ("ncclSend" in names) != is_one
            assert program.plan.scratch_bytes == 0


def test_a_schedule_that_is_named_runs_by_messages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu_world.gather_results_always(monkeypatch)
    call = Call(Collective.ALL_REDUCE, DType.FLOAT32, 4096, ReduceOp.SUM)
    for schedule in ("oneshot", "direct"):
        plan = bounded_plan(call, 0, 4, Options(schedule=schedule), 1)
        assert all(step.gather is None for step in plan.steps)
    assert any(step.gather for step in bounded_plan(call, 0, 4, Options(), 1).steps)
    assert all(step.gather is None for step in bounded_plan(call, 0, 4, Options(), 4).steps), "on one host"
