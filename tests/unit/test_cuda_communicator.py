# SPDX-License-Identifier: Apache-2.0
"""The collectives of a group on a fake GPU: staging, streams, scratch, graphs, timeouts."""

import time
from typing import Any

import numpy as np
import pytest

from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.cuda.native_call import Streams
from detcomm.errors import PeerTimeoutError, TransportError, UsageError
from detcomm.options import Options
from detcomm.request import Request
from tests import fake_communicators as fake
from tests import fake_gpu, fake_gpu_world, inputs, oracle
from tests.fake_communicators import CALL, STREAMS

pytestmark = fake_gpu.needs_native


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("op", ["sum", "premul_sum"])
def test_all_reduce_on_every_rank(world_size: int, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = fake.World(world_size, Options(chunk_bytes=1024), monkeypatch)
    given = inputs.make("float32", 1003, world_size)
    factors = inputs.factors(world_size) if op == "premul_sum" else None
    call = Call(Collective.ALL_REDUCE, DType.FLOAT32, 1003, ReduceOp(op))
    expected = inputs.bits(oracle.reduce(given, "float32", op, factors=factors))
    more = {} if factors is None else {"factors": factors}
    for _ in range(2):
        for output in fake.run(world, call, given, **more):
            assert np.array_equal(output, expected)
    assert [communicator.sequence for communicator in world.communicators] == [2] * world_size


@pytest.mark.parametrize("schedule", ["auto", "direct", "halving", "oneshot", "ring"])
@pytest.mark.parametrize("world_size", [3, 8])
def test_the_reference_path_makes_the_same_calls(
    schedule: str, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python what native code does: the same operations in the same order on the same streams, the same bits."""
    if schedule == "auto":
        fake_gpu_world.gather_results_always(monkeypatch)
    association = "ring" if schedule == "ring" else "tree"
    given = inputs.make("float32", 1003, world_size)
    expected = inputs.bits(oracle.reduce(given, "float32", "sum", association=association, ring_chunk_elems=64))
    told = []
    for path in ("native", "reference"):
        options = Options(
            association=association, schedule=schedule, ring_chunk_elems=64, chunk_bytes=1024, cuda_path=path
        )
        world = fake.World(world_size, options, monkeypatch)
        for output in fake.run(world, CALL, given):
            assert np.array_equal(output, expected)
        assert (world.communicators[0]._carrier.nccl is None) == (path == "reference")
        names = [[name for name, *_ in gpu.calls if name.startswith("nccl") or "Event" in name] for gpu in world.gpus]
        told.append(names)
    assert told[0] == told[1]


def test_memory_that_overlaps_otherwise_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    world = fake.World(3, Options(), monkeypatch)
    given = inputs.make("float32", 1003, 3)
    rooms = [np.concatenate([inputs.bits(array), np.zeros(4, np.uint8)]) for array in given]

    def run(rank: int) -> Any:
        size = 1003 * 4
        request = Request(CALL, fake.memory(rooms[rank][:size]), fake.memory(rooms[rank][4:]))
        world.communicators[rank].run_many([request], STREAMS, capturing=False, timeout_s=60.0, kept=[])
        return rooms[rank][4:]

    expected = inputs.bits(oracle.reduce(given, "float32", "sum"))
    for output in world.on_each(run):
        assert np.array_equal(output, expected)


def test_another_stream_waits_for_the_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    world = fake.World(2, Options(), monkeypatch)
    given = inputs.make("float32", 1003, 2)
    fake.run(world, CALL, given, streams=Streams(0xF1, fake_gpu.SIDE_STREAM))
    (last,) = {args[0] for name, *args in world.gpus[0].calls[-1:] if name == "cuEventRecord"} or {None}
    del world.gpus[0].calls[:]
    fake.run(world, CALL, given)
    waits = [tuple(args) for name, *args in world.gpus[0].calls if name == "cuStreamWaitEvent"]
    assert (last, fake_gpu.MAIN_STREAM) in waits
    del world.gpus[0].calls[:]
    fake.run(world, CALL, given)
    assert not [name for name, *_ in world.gpus[0].calls if name == "cuStreamWaitEvent"], "the same stream has order"


def test_the_short_way_of_a_call_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same calls of CUDA and NCCL as the long way, behind the last call on another stream, and watched."""
    world = fake.World(2, Options(), monkeypatch)
    given = inputs.make("float32", 1003, 2)
    long = fake.run(world, CALL, given, streams=Streams(0xF1, fake_gpu.SIDE_STREAM))
    fake.run(world, CALL, given)
    told = [list(gpu.calls) for gpu in world.gpus]
    data = [inputs.bits(array).copy() for array in given]

    def run(rank: int, main: int) -> None:
        communicator = world.communicators[rank]
        (prepared,) = communicator._calls._known.values()
        start = data[rank].ctypes.data
        communicator.run_prepared(prepared, "", start, start, Streams(main, fake_gpu.SIDE_STREAM), 60.0)

    world.on_each(lambda rank: run(rank, fake_gpu.MAIN_STREAM))
    for output, expected in zip(data, long, strict=True):
        assert np.array_equal(output, expected)
    names = [name for name, *_ in world.gpus[0].calls[len(told[0]) :]]
    assert names == ["cuCtxSetCurrent", "ncclAllGather", "cuLaunchKernel", "cuEventRecord"]
    world.on_each(lambda rank: run(rank, 0xF1))
    waits = [args for name, *args in world.gpus[0].calls if name == "cuStreamWaitEvent"]
    (last,) = {args[0] for name, *args in world.gpus[0].calls[len(told[0]) :][3:4]}
    assert waits[-1][:2] == [last, 0xF1]
    assert world.communicators[0].sequence == 4
    assert world.communicators[0].oldest.sequence == 1
    for gpu in world.gpus:
        gpu.fails["ncclAllGather"] = 5
    with pytest.raises(TransportError, match="ncclAllGather failed: error 5"):
        world.on_each(lambda rank: run(rank, 0xF1))
    assert all(communicator._carrier.nccl.was_aborted for communicator in world.communicators)


def test_a_graph_has_its_own_scratch_and_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    world = fake.World(2, Options(), monkeypatch)
    given = inputs.make("float32", 1003, 2)
    fake.run(world, CALL, given)
    eager = [communicator._scratch.take(1) for communicator in world.communicators]
    world.on_each(lambda rank: world.communicators[rank].poll())
    kept: list[Any] = []
    fake.run(world, CALL, given, capturing=True, kept=kept)
    assert {room.data_ptr() for room in kept}.isdisjoint(eager)
    assert len(kept) == 2
    assert [communicator.oldest for communicator in world.communicators] == [None, None]
    assert all(communicator.has_captured for communicator in world.communicators)


def test_tensors_are_kept_until_the_gpu_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    world = fake.World(2, Options(), monkeypatch)
    for gpu in world.gpus:
        gpu.is_stuck = True
    kept: list[Any] = ["a tensor"]
    fake.run(world, CALL, inputs.make("float32", 1003, 2), kept=kept)
    world.on_each(lambda rank: world.communicators[rank].poll())
    assert kept is world.communicators[0].oldest.kept[0]
    for gpu in world.gpus:
        gpu.is_stuck = False
    world.on_each(lambda rank: world.communicators[rank].poll())
    assert world.communicators[0].oldest is None


def test_what_is_not_done_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world = fake.World(2, Options(), monkeypatch)
    world.gpus[0].is_stuck = True
    fake.run(world, CALL, inputs.make("float32", 1003, 2), timeout_s=0.01)
    time.sleep(0.05)
    with pytest.raises(PeerTimeoutError, match=r"collective #1, all_reduce\(sum, float32\[1003\]\), is not done"):
        world.on_each(lambda rank: world.communicators[rank].poll() if rank == 0 else None)


def test_what_nccl_reports_names_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    world = fake.World(2, Options(), monkeypatch)
    world.gpus[0].is_stuck = True
    fake.run(world, CALL, inputs.make("float32", 1003, 2))

    def fail() -> None:
        raise TransportError("NCCL reports an error")

    monkeypatch.setattr(world.communicators[0]._carrier.nccl, "check", fail)
    with pytest.raises(TransportError, match=r"rank 0 in collective #1, all_reduce\(sum, float32\[1003\]\): NCCL rep"):
        world.on_each(lambda rank: world.communicators[rank].poll() if rank == 0 else None)


def test_a_function_that_fails_aborts_the_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    world = fake.World(2, Options(schedule="direct"), monkeypatch)
    for gpu in world.gpus:
        gpu.fails["ncclSend"] = 5
    with pytest.raises(TransportError, match="ncclSend failed: error 5"):
        fake.run(world, CALL, inputs.make("float32", 1003, 2))
    assert all(communicator._carrier.nccl.was_aborted for communicator in world.communicators)


def test_wrong_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = fake.World(1, Options(), monkeypatch)
    with pytest.raises(UsageError, match="expected an input of 4012 bytes, got 4008"):
        fake.run(world, CALL, [np.zeros(1002, np.float32)])
    assert world.gpus[0].calls == []
