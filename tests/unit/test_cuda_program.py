# SPDX-License-Identifier: Apache-2.0
"""Programs for CUDA streams, run natively against a fake GPU: bits, every call, and what waits for what."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detcomm.call import Call, even_shards
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.cuda import native
from detcomm.cuda.bounded_plan import bounded_plan
from detcomm.cuda.program import Program
from detcomm.options import Options
from tests import fake_gpu, fake_gpu_world, inputs, oracle

HEADER = Path(__file__).parents[2] / "native" / "cuda" / "detcomm_cuda.h"


pytestmark = fake_gpu.needs_native


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize(
    ("association", "schedule"),
    [("tree", "direct"), ("tree", "halving"), ("tree", "oneshot"), ("tree", "binomial"), ("linear", "direct"),
     ("ring", "ring"), ("ring", "direct")],
)  # fmt: skip
@pytest.mark.parametrize("in_place", [False, True])
def test_all_reduce_has_the_bits_of_the_oracle(
    world_size: int, association: str, schedule: str, in_place: bool
) -> None:
    options = Options(association=association, schedule=schedule, ring_chunk_elems=64, chunk_bytes=1024)
    count = 1501
    given = inputs.make("bfloat16", count, world_size)
    call = Call(Collective.ALL_REDUCE, DType.BFLOAT16, count, ReduceOp.SUM)
    outputs, _, _ = fake_gpu_world.run(call, options, [inputs.bits(one) for one in given], in_place)
    expected = oracle.reduce(given, "bfloat16", "sum", association=association, ring_chunk_elems=64)
    for output in outputs:
        assert np.array_equal(output, inputs.bits(expected))
    if world_size > 2:
        other = oracle.reduce(
            given, "bfloat16", "sum", association="tree" if association == "ring" else "ring", ring_chunk_elems=64
        )
        assert not np.array_equal(inputs.bits(other), inputs.bits(expected)), "these inputs show no order"


@pytest.mark.parametrize("world_size", [3, 4, 7])
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_scatter_and_all_gather(world_size: int, in_place: bool) -> None:
    options = Options(chunk_bytes=512)
    count = 331 * world_size
    given = inputs.make("float32", count, world_size)
    call = Call(Collective.REDUCE_SCATTER, DType.FLOAT32, count, ReduceOp.AVG, even_shards(count, world_size))
    outputs, _, _ = fake_gpu_world.run(call, options, [inputs.bits(one) for one in given], in_place)
    expected = inputs.bits(oracle.reduce(given, "float32", "avg"))
    assert np.array_equal(np.concatenate(outputs), expected)
    gather = Call(Collective.ALL_GATHER, DType.FLOAT32, count, None, even_shards(count, world_size))
    for gathered in fake_gpu_world.run(gather, options, outputs)[0]:
        assert np.array_equal(gathered, expected)


@pytest.mark.parametrize("schedule", ["direct", "halving", "oneshot", "ring"])
def test_the_calls_are_those_of_the_plan(schedule: str) -> None:
    """Groups, messages and launches, counted by the fake and by formula; nothing else is called."""
    association = "ring" if schedule == "ring" else "tree"
    options = Options(association=association, schedule=schedule, ring_chunk_elems=128, chunk_bytes=2048)
    world_size, count = 4, 4096
    call = Call(Collective.ALL_REDUCE, DType.FLOAT32, count, ReduceOp.SUM)
    _, gpus, programs = fake_gpu_world.run(
        call, options, [inputs.bits(one) for one in inputs.make("float32", count, world_size)]
    )
    for gpu, program in zip(gpus, programs, strict=True):
        names = [name for name, *_ in gpu.calls]
        assert names.count("ncclGroupStart") == names.count("ncclGroupEnd") == program.counts.num_groups
        assert names.count("cuLaunchKernel") == program.counts.num_launches
        sent = sum(args[1] for name, *args in gpu.calls if name == "ncclSend")
        received = sum(args[1] for name, *args in gpu.calls if name == "ncclRecv")
        assert (sent, received) == (program.counts.sent_bytes, program.counts.received_bytes)
        assert sent == program.plan.sent_bytes
    steps = {"direct": 2, "halving": 4, "ring": 2 * (world_size - 1), "oneshot": 1}[schedule]
    volume = (world_size - 1) * count * 4 if schedule == "oneshot" else 2 * (world_size - 1) * count * 4 // world_size
    assert all(program.plan.sent_bytes == volume for program in programs)
    num_pieces = count * 4 // 2048
    assert all(program.counts.num_groups >= min(steps, num_pieces) for program in programs)


def _happens_before(gpu: fake_gpu.FakeGpu) -> tuple[list[tuple[int, list[int]]], list[tuple[Any, ...]]]:
    """For each call of a stream its place on both streams, and what it is behind: vector clocks."""
    clock = {fake_gpu.MAIN_STREAM: [0, 0], fake_gpu.SIDE_STREAM: [0, 0]}
    index = {fake_gpu.MAIN_STREAM: 0, fake_gpu.SIDE_STREAM: 1}
    events: dict[int, list[int]] = {}
    stamped: list[tuple[int, list[int]]] = []
    actions = []
    for name, *args in gpu.calls:
        if name == "cuEventRecord":
            events[args[0]] = list(clock[args[1]])
        elif name == "cuStreamWaitEvent":
            clock[args[1]] = [max(pair) for pair in zip(clock[args[1]], events[args[0]], strict=True)]
        elif name in ("cuLaunchKernel", "ncclGroupStart", "ncclAllGather"):
            stream = {"cuLaunchKernel": args[2:3], "ncclAllGather": args[1:2]}.get(name, [fake_gpu.MAIN_STREAM])[0]
            clock[stream][index[stream]] += 1
            stamped.append((index[stream], list(clock[stream])))
            actions.append((name, *args))
    return stamped, actions


@pytest.mark.parametrize("schedule", ["auto", "direct", "halving", "oneshot", "ring"])
def test_operations_on_the_same_bytes_are_ordered_between_the_streams(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    association = "ring" if schedule == "ring" else "tree"
    if schedule == "auto":
        fake_gpu_world.gather_results_always(monkeypatch)
    options = Options(association=association, schedule=schedule, ring_chunk_elems=64, chunk_bytes=1024)
    world_size, count = 5, 5003
    call = Call(Collective.ALL_REDUCE, DType.BFLOAT16, count, ReduceOp.SUM)
    given = [inputs.bits(one) for one in inputs.make("bfloat16", count, world_size)]
    _, gpus, programs = fake_gpu_world.run(call, options, given, in_place=True)
    num_concurrent = 0
    for gpu, program in zip(gpus, programs, strict=True):
        assert program.uses_side_stream
        stamped, _ = _happens_before(gpu)
        touched = [_touched(program, op) for op in program.ops if op.kind not in (native.RECORD, native.WAIT)]
        assert len(touched) == len(stamped)
        for later in range(len(stamped)):
            for earlier in range(max(0, later - 40), later):
                stream, clock = stamped[earlier]
                is_ordered = stamped[later][1][stream] >= clock[stream]
                num_concurrent += not is_ordered
                assert is_ordered or not _clash(touched[earlier], touched[later])
        last_stream, last = stamped[-1]
        assert last_stream in (0, 1)
        assert last
    assert num_concurrent or schedule == "oneshot", "nothing overlaps: the side stream is of no use"


def _touched(program: Program, op: native.COp) -> tuple[list[Any], list[Any]]:
    """What an operation reads and writes, input and output being the same memory."""
    spans = []
    for region in program.regions[op.first_region : op.first_region + op.num_regions]:
        spans.append((max(region.buffer, 1), region.offset, region.offset + region.num_bytes))
    if op.kind in (native.FOLD, native.GATHER):
        return spans[:-1], spans[-1:]
    if op.kind == native.COPY:
        return spans[::2], spans[1::2]
    return spans[: op.num_sends], spans[op.num_sends :]


def _clash(one: tuple[list[Any], list[Any]], other: tuple[list[Any], list[Any]]) -> bool:
    pairs = [(w, x) for w in one[1] for x in (*other[0], *other[1])] + [(r, w) for r in one[0] for w in other[1]]
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a, b in pairs)


def test_a_call_on_another_stream_and_its_events() -> None:
    kernels = fake_gpu.Kernels()
    call = Call(Collective.ALL_REDUCE, DType.FLOAT32, 0, ReduceOp.SUM)
    (program,) = fake_gpu_world.programs(call, 1, Options(), kernels)
    gpu = fake_gpu.FakeGpu(0, fake_gpu.Network(), kernels)
    nothing = np.zeros(1, np.uint8)
    assert gpu.run(program, nothing, nothing, caller=0xF0, begin=1, after=2, done=3) is None
    assert gpu.calls == [
        ("cuCtxSetCurrent", fake_gpu.CONTEXT),
        ("cuEventRecord", 1, 0xF0),
        ("cuStreamWaitEvent", 1, fake_gpu.MAIN_STREAM),
        ("cuStreamWaitEvent", 2, fake_gpu.MAIN_STREAM),
        ("cuEventRecord", 3, fake_gpu.MAIN_STREAM),
    ]


@pytest.mark.parametrize("function", ["ncclSend", "ncclRecv", "ncclGroupEnd", "cuLaunchKernel"])
def test_the_first_function_that_fails_is_named_and_the_group_is_closed(function: str) -> None:
    kernels = fake_gpu.Kernels()
    call = Call(Collective.ALL_REDUCE, DType.FLOAT32, 64, ReduceOp.SUM)
    program = fake_gpu_world.programs(call, 3, Options(schedule="direct"), kernels)[1]
    gpu = fake_gpu.FakeGpu(1, fake_gpu.Network(), kernels, fails={function: 42})
    data = np.zeros(256, np.uint8)
    failure = gpu.run(program, data, data.copy())
    assert failure is not None
    assert (failure.function, failure.code) == (function.encode(), 42)
    names = [name for name, *_ in gpu.calls]
    assert names.count("ncclGroupStart") == names.count("ncclGroupEnd")
    assert names.count(function) == 1, "nothing is issued after a failure"


@pytest.mark.parametrize("schedule", ["auto", "direct", "halving", "oneshot", "ring"])
@pytest.mark.parametrize("world_size", [2, 7, 16])
def test_scratch_is_bounded_whatever_the_size(schedule: str, world_size: int) -> None:
    association = "ring" if schedule == "ring" else "tree"
    options = Options(association=association, schedule=schedule, scratch_bytes=32 << 20)
    call = Call(Collective.ALL_REDUCE, DType.BFLOAT16, (8 << 20) + 1, ReduceOp.SUM)
    plans = [bounded_plan(call, rank, world_size, options, 1) for rank in {0, world_size // 2, world_size - 1}]
    assert max(plan.scratch_bytes for plan in plans) <= 32 << 20
    assert len({plan.schedule_fingerprint for plan in plans}) == 1


def test_the_header_agrees_with_its_view() -> None:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    structures = {
        "functions": native.Functions, "region": native.CRegion, "op": native.COp, "program": native.CProgram,
        "call": native.CCall, "failure": native.CFailure, "signal": native.CSignal, "peers": native.CPeers,
    }  # fmt: skip
    for name, structure in structures.items():
        (body,) = re.findall(rf"typedef struct dc_cuda_{name} \{{(.*?)\}} dc_cuda_{name};", text, re.DOTALL)
        declared = re.findall(r"\(\*(\w+)\)|(\w+)(?:\[\w+\])?;", body)
        names = [pointer or plain for pointer, plain in declared]
        assert names == [field[0] for field in structure._fields_], name
    kinds = dict(re.findall(r"DC_CUDA_([A-Z_]+) = (\d+)", text))
    assert len(kinds) == 10
    assert all(getattr(native, kind) == int(value) for kind, value in kinds.items())
