# SPDX-License-Identifier: Apache-2.0
"""What a call costs on a GPU: wire bytes, NCCL groups, launches and memory traffic, counted and by closed formulas."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from detcomm.call import Call, even_shards
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.cuda import native
from detcomm.options import Options
from detcomm.pricing.loads import Message, all_reduce_loads
from detcomm.schedules import parse
from tests import fake_gpu, fake_gpu_world

pytestmark = fake_gpu.needs_native

ELEMS = 840 * 64
"""A multiple of 3, 4, 5, 7 and 8, also in units of aligned elements: no shard is longer than another."""


@pytest.fixture
def memory_traffic(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Bytes that the kernels of each rank really read and write: by folds, by copies."""
    traffic: dict[int, list[int]] = {}
    fold: Callable[..., None] = fake_gpu.FakeGpu._fold
    copy: Callable[..., None] = fake_gpu.FakeGpu._copy

    def counted_fold(gpu: fake_gpu.FakeGpu, kernel: int, parameters: Any) -> None:
        spec = gpu.kernels.specs[kernel]
        assert spec is not None
        count = ctypes.cast(parameters[2], ctypes.POINTER(ctypes.c_uint64))[0]
        item_bytes = sum(dtype.itemsize for dtype in spec.input_dtypes) + spec.output_dtype.itemsize
        traffic.setdefault(gpu.rank, [0, 0])[0] += count * item_bytes
        fold(gpu, kernel, parameters)

    def counted_copy(gpu: fake_gpu.FakeGpu, parameters: Any, num_copies: int) -> None:
        copies = ctypes.cast(parameters[0], ctypes.POINTER(ctypes.c_uint64))
        lengths = copies[2 * native.MAX_COPIES : 2 * native.MAX_COPIES + num_copies]
        traffic.setdefault(gpu.rank, [0, 0])[1] += 2 * sum(lengths)
        copy(gpu, parameters, num_copies)

    monkeypatch.setattr(fake_gpu.FakeGpu, "_fold", counted_fold)
    monkeypatch.setattr(fake_gpu.FakeGpu, "_copy", counted_copy)
    return traffic


def _run(call: Call, options: Options, num_bytes: int, world_size: int, traffic: dict[int, list[int]]) -> list[Any]:
    """The counts of each rank's program, once each rank's fake has counted the same."""
    given = [np.full(num_bytes, rank, np.uint8) for rank in range(world_size)]
    _, gpus, programs = fake_gpu_world.run(call, options, given)
    for gpu, program in zip(gpus, programs, strict=True):
        names = [name for name, *_ in gpu.calls]
        counts = program.counts
        gathered = [args[0] for name, *args in gpu.calls if name == "ncclAllGather"]
        sent, received = (
            sum(args[1] for name, *args in gpu.calls if name == function) + (world_size - 1) * sum(gathered)
            for function in ("ncclSend", "ncclRecv")
        )
        assert (sent, received) == (counts.sent_bytes, counts.received_bytes)
        assert names.count("ncclGroupStart") + len(gathered) == counts.num_groups
        assert names.count("cuLaunchKernel") == counts.num_launches
        assert traffic.get(gpu.rank, [0, 0]) == [counts.folded_bytes, counts.copied_bytes]
    return [program.counts for program in programs]


@pytest.mark.parametrize(
    ("schedule", "world_size"),
    [*((schedule, size) for schedule in ("direct", "oneshot", "ring") for size in (3, 5, 8)), ("halving", 8)],
)
def test_all_reduce_costs_what_its_formula_says(
    schedule: str, world_size: int, memory_traffic: dict[int, list[int]]
) -> None:
    """Of one piece: a step is an NCCL group, and a launch where it folds; halving packs what is not contiguous."""
    association = "ring" if schedule == "ring" else "tree"
    options = Options(association=association, schedule=schedule, ring_chunk_elems=ELEMS // world_size)
    call = Call(Collective.ALL_REDUCE, DType.BFLOAT16, ELEMS, ReduceOp.SUM)
    message = Message.of(ELEMS * 2, DType.BFLOAT16, "float32")
    steps = all_reduce_loads(parse(schedule, world_size), message, world_size, 1)
    for counts in _run(call, options, ELEMS * 2, world_size, memory_traffic):
        assert counts.sent_bytes == sum(step.network_bytes for step in steps)
        assert counts.folded_bytes == sum(step.folded_bytes for step in steps)
        assert counts.num_groups == len(steps)
        if schedule != "halving":
            assert counts.num_launches == sum(bool(step.folded_bytes) for step in steps)
        assert (counts.copied_bytes > 0) == (schedule == "halving")


@pytest.mark.parametrize("world_size", [3, 4, 7, 8])
def test_reduce_scatter_and_all_gather_cost_what_their_formulas_say(
    world_size: int, memory_traffic: dict[int, list[int]]
) -> None:
    num_bytes = ELEMS * 4
    shards = even_shards(ELEMS, world_size)
    call = Call(Collective.REDUCE_SCATTER, DType.FLOAT32, ELEMS, ReduceOp.SUM, shards)
    for counts in _run(call, Options(schedule="direct"), num_bytes, world_size, memory_traffic):
        assert counts.sent_bytes == counts.received_bytes == (world_size - 1) * num_bytes // world_size
        assert counts.folded_bytes == (world_size + 1) * num_bytes // world_size
        assert (counts.num_groups, counts.num_launches, counts.copied_bytes) == (1, 1, 0)
    memory_traffic.clear()
    gather = Call(Collective.ALL_GATHER, DType.FLOAT32, ELEMS, None, shards)
    for counts in _run(gather, Options(), num_bytes // world_size, world_size, memory_traffic):
        assert counts.sent_bytes == counts.received_bytes == (world_size - 1) * num_bytes // world_size
        assert (counts.num_groups, counts.num_launches, counts.folded_bytes) == (1, 0, 0)


def test_bytes_do_not_depend_on_the_pieces(memory_traffic: dict[int, list[int]]) -> None:
    """A message in seven pieces moves and folds the same bytes, in more groups and launches."""
    call = Call(Collective.ALL_REDUCE, DType.FLOAT32, ELEMS, ReduceOp.SUM)
    whole = _run(call, Options(schedule="direct"), ELEMS * 4, 4, memory_traffic)[0]
    memory_traffic.clear()
    pieces = _run(call, Options(schedule="direct", chunk_bytes=ELEMS * 4 // 7), ELEMS * 4, 4, memory_traffic)[0]
    assert (pieces.sent_bytes, pieces.folded_bytes) == (whole.sent_bytes, whole.folded_bytes)
    assert pieces.num_launches > whole.num_launches
    assert pieces.num_groups > whole.num_groups
