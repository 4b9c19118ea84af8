# SPDX-License-Identifier: Apache-2.0
"""The collectives of a group on a fake GPU: staging, streams, scratch, graphs, timeouts."""

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.cuda import communicator as module
from detcomm.cuda import contribution, events, libraries
from detcomm.cuda.communicator import CudaCommunicator
from detcomm.cuda.native_call import Streams
from detcomm.cuda.reference_call import Parcel
from detcomm.errors import PeerTimeoutError, TransportError, UsageError
from detcomm.fold import premultiply
from detcomm.memory import DeviceMemory
from detcomm.options import Options
from detcomm.request import Request
from tests import fake_gpu, fake_gpu_world, inputs, oracle

STREAMS = Streams(fake_gpu.MAIN_STREAM, fake_gpu.SIDE_STREAM)


pytestmark = fake_gpu.needs_native


class _Kernels:
    """As ``detcomm.cuda.kernels.Kernels``, on the host."""

    context = fake_gpu.CONTEXT

    def __init__(self, device: int, kernels: fake_gpu.Kernels) -> None:
        self.device = device
        compiler = kernels.compiler()
        self.fold, self.fold_blocks, self.copy = compiler.fold, compiler.fold_blocks, compiler.copy
        self.fold_on_host = kernels.run_fold

    def make_current(self) -> None:
        pass

    def premultiply(self, dtype: DType) -> Any:
        return dtype

    def launch(self, kernel: Any, num_blocks: int, stream: int, *arguments: Any) -> None:
        if isinstance(kernel, DType):
            assert stream == fake_gpu.MAIN_STREAM
            src, dst, count, factor = (value.value for value in arguments)
            size = count * kernel.itemsize
            premultiply(kernel, factor, fake_gpu.bytes_at(src, size), fake_gpu.bytes_at(dst, size))
            return
        operands, output, count, divisor = arguments
        self.fold_on_host(kernel, list(operands), output.value, count.value, divisor.value)


class _Room:
    def __init__(self, num_bytes: int) -> None:
        self.memory = np.zeros(num_bytes, np.uint8)

    def data_ptr(self) -> int:
        return int(self.memory.ctypes.data)


class _Nccl:
    handle = fake_gpu.COMM
    was_aborted = False

    def __init__(self, *args: Any) -> None:
        pass

    def check(self) -> None:
        pass

    def abort(self) -> None:
        self.was_aborted = True

    def close(self) -> None:
        pass


class _Mover:
    """Moves what the reference path moves through stock calls."""

    def __init__(self, gpu: fake_gpu.FakeGpu) -> None:
        self.gpu = gpu

    def copy(self, stream: int, src: DeviceMemory, dst: DeviceMemory) -> None:
        assert src.size == dst.size
        ctypes.memmove(dst.start, src.start, src.size)

    def exchange(self, stream: int, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> None:
        self.gpu["ncclGroupStart"]()
        for peer, memory in sends:
            self.gpu["ncclSend"](memory.start, memory.size, 1, peer, fake_gpu.COMM, stream)
        for peer, memory in recvs:
            self.gpu["ncclRecv"](memory.start, memory.size, 1, peer, fake_gpu.COMM, stream)
        self.gpu["ncclGroupEnd"]()

    def gather(self, stream: int, src: DeviceMemory, dst: DeviceMemory) -> None:
        assert dst.size == src.size * self.gpu.network.world_size
        self.gpu["ncclAllGather"](src.start, dst.start, src.size, 1, fake_gpu.COMM, stream)


class _World:
    """Communicators of all ranks, each used from a thread of its own."""

    def __init__(self, world_size: int, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here = threading.local()
        network, kernels = fake_gpu.Network(world_size), fake_gpu.Kernels()
        self.gpus = [fake_gpu.FakeGpu(rank, network, kernels) for rank in range(world_size)]
        for place in (module, events, libraries, contribution):
            monkeypatch.setattr(place, "driver", lambda: self.here.gpu)
        monkeypatch.setattr(module, "nccl", lambda: self.here.gpu)
        monkeypatch.setattr(module, "NcclCommunicator", _Nccl)
        self.communicators: list[Any] = [None] * world_size
        self.on_each(lambda rank: self._make(rank, world_size, options, kernels))

    def _make(self, rank: int, world_size: int, options: Options, kernels: fake_gpu.Kernels) -> None:
        known: Any = _Kernels(rank, kernels)
        self.communicators[rank] = CudaCommunicator(
            "fake", None, rank, world_size, options, 1, known, _Room, lambda: None, 1.0,
            _Mover(self.gpus[rank]) if options.cuda_path == "reference" else None,
        )  # fmt: skip

    def on_each(self, function: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * len(self.gpus)
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            self.here.gpu = self.gpus[rank]
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(self.gpus))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


def _memory(array: Any) -> Any:
    return DeviceMemory(array.ctypes.data, array.nbytes)


def _run(world: _World, call: Call, given: list[Any], **more: Any) -> list[Any]:
    """One collective in place on all ranks; copies of what they have afterwards."""
    data = [inputs.bits(array).copy() for array in given]
    factors = more.pop("factors", [None] * len(given))

    def run(rank: int) -> Any:
        request = Request(call, _memory(data[rank]), _memory(data[rank]), factors[rank])
        arguments = {"streams": STREAMS, "capturing": False, "timeout_s": 60.0, "kept": []} | more
        world.communicators[rank].run_many([request], **arguments)
        return data[rank]

    return world.on_each(run)


CALL = Call(Collective.ALL_REDUCE, DType.FLOAT32, 1003, ReduceOp.SUM)


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("op", ["sum", "premul_sum"])
def test_all_reduce_on_every_rank(world_size: int, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(world_size, Options(chunk_bytes=1024), monkeypatch)
    given = inputs.make("float32", 1003, world_size)
    factors = inputs.factors(world_size) if op == "premul_sum" else None
    call = Call(Collective.ALL_REDUCE, DType.FLOAT32, 1003, ReduceOp(op))
    expected = inputs.bits(oracle.reduce(given, "float32", op, factors=factors))
    more = {} if factors is None else {"factors": factors}
    for _ in range(2):
        for output in _run(world, call, given, **more):
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
        world = _World(world_size, options, monkeypatch)
        for output in _run(world, CALL, given):
            assert np.array_equal(output, expected)
        assert (world.communicators[0]._nccl is None) == (path == "reference")
        names = [[name for name, *_ in gpu.calls if name.startswith("nccl") or "Event" in name] for gpu in world.gpus]
        told.append(names)
    assert told[0] == told[1]


def test_memory_that_overlaps_otherwise_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(3, Options(), monkeypatch)
    given = inputs.make("float32", 1003, 3)
    rooms = [np.concatenate([inputs.bits(array), np.zeros(4, np.uint8)]) for array in given]

    def run(rank: int) -> Any:
        size = 1003 * 4
        request = Request(CALL, _memory(rooms[rank][:size]), _memory(rooms[rank][4:]))
        world.communicators[rank].run_many([request], STREAMS, capturing=False, timeout_s=60.0, kept=[])
        return rooms[rank][4:]

    expected = inputs.bits(oracle.reduce(given, "float32", "sum"))
    for output in world.on_each(run):
        assert np.array_equal(output, expected)


def test_another_stream_waits_for_the_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(2, Options(), monkeypatch)
    given = inputs.make("float32", 1003, 2)
    _run(world, CALL, given, streams=Streams(0xF1, fake_gpu.SIDE_STREAM))
    (last,) = {args[0] for name, *args in world.gpus[0].calls[-1:] if name == "cuEventRecord"} or {None}
    del world.gpus[0].calls[:]
    _run(world, CALL, given)
    waits = [tuple(args) for name, *args in world.gpus[0].calls if name == "cuStreamWaitEvent"]
    assert (last, fake_gpu.MAIN_STREAM) in waits
    del world.gpus[0].calls[:]
    _run(world, CALL, given)
    assert not [name for name, *_ in world.gpus[0].calls if name == "cuStreamWaitEvent"], "the same stream has order"


def test_a_graph_has_its_own_scratch_and_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(2, Options(), monkeypatch)
    given = inputs.make("float32", 1003, 2)
    _run(world, CALL, given)
    eager = [communicator._scratch.take(1) for communicator in world.communicators]
    world.on_each(lambda rank: world.communicators[rank].poll())
    kept: list[Any] = []
    _run(world, CALL, given, capturing=True, kept=kept)
    assert {room.data_ptr() for room in kept}.isdisjoint(eager)
    assert len(kept) == 2
    assert [communicator.oldest for communicator in world.communicators] == [None, None]
    assert all(communicator.has_captured for communicator in world.communicators)


def test_tensors_are_kept_until_the_gpu_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(2, Options(), monkeypatch)
    for gpu in world.gpus:
        gpu.is_stuck = True
    kept: list[Any] = ["a tensor"]
    _run(world, CALL, inputs.make("float32", 1003, 2), kept=kept)
    world.on_each(lambda rank: world.communicators[rank].poll())
    assert kept is world.communicators[0].oldest.kept[0]
    for gpu in world.gpus:
        gpu.is_stuck = False
    world.on_each(lambda rank: world.communicators[rank].poll())
    assert world.communicators[0].oldest is None


def test_what_is_not_done_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(2, Options(), monkeypatch)
    world.gpus[0].is_stuck = True
    _run(world, CALL, inputs.make("float32", 1003, 2), timeout_s=0.01)
    time.sleep(0.05)
    with pytest.raises(PeerTimeoutError, match=r"collective #1, all_reduce\(sum, float32\[1003\]\), is not done"):
        world.on_each(lambda rank: world.communicators[rank].poll() if rank == 0 else None)


def test_a_function_that_fails_aborts_the_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(2, Options(schedule="direct"), monkeypatch)
    for gpu in world.gpus:
        gpu.fails["ncclSend"] = 5
    with pytest.raises(TransportError, match="ncclSend failed: error 5"):
        _run(world, CALL, inputs.make("float32", 1003, 2))
    assert all(communicator._nccl.was_aborted for communicator in world.communicators)


def test_wrong_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(1, Options(), monkeypatch)
    with pytest.raises(UsageError, match="expected an input of 4012 bytes, got 4008"):
        _run(world, CALL, [np.zeros(1002, np.float32)])
    assert world.gpus[0].calls == []
