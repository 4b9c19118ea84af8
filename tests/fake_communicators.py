# SPDX-License-Identifier: Apache-2.0
"""CUDA communicators of all ranks on fake GPUs, each used from a thread of its own."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from torch.distributed import HashStore, PrefixStore

from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.cuda import carrier, contribution, events, libraries
from detcomm.cuda import communicator as module
from detcomm.cuda.carrier import Membership
from detcomm.cuda.communicator import CudaCommunicator
from detcomm.cuda.native_call import Streams
from detcomm.cuda.peer_memory import device_access, host_words, ipc
from detcomm.cuda.reference_call import Parcel
from detcomm.fold import premultiply
from detcomm.memory import DeviceMemory
from detcomm.options import Options
from detcomm.request import Request
from tests import fake_gpu, inputs
from tests.fake_device_memory import FakeDeviceMemory, FakeNode

STREAMS = Streams(fake_gpu.MAIN_STREAM, fake_gpu.SIDE_STREAM)
CALL = Call(Collective.ALL_REDUCE, DType.FLOAT32, 1003, ReduceOp.SUM)


class Kernels:
    """As ``detcomm.cuda.kernels.Kernels``, on the host."""

    context = fake_gpu.CONTEXT

    def __init__(self, device: int, kernels: fake_gpu.Kernels) -> None:
        self.device = device
        compiler = kernels.compiler()
        self.fold, self.fold_blocks, self.copy = compiler.fold, compiler.fold_blocks, compiler.copy
        self.peer_fold, self.peer_copy, self.sync = compiler.peer_fold, compiler.peer_copy, compiler.sync
        self.fused = compiler.fused
        self.fold_on_host = kernels.run_fold
        self.bus, self.num_processors = f"bus-{device}", 132

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


class Room:
    def __init__(self, num_bytes: int) -> None:
        self.memory = np.zeros(num_bytes, np.uint8)

    def data_ptr(self) -> int:
        return int(self.memory.ctypes.data)


class Nccl:
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


class Mover:
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


class World:
    """Communicators of all ranks, each used from a thread of its own.

    Args:
        block_size: ranks that share a host; with ``cuda_transport`` they share fake device memory.
        timeout_s: of the group.
    """

    def __init__(
        self,
        world_size: int,
        options: Options,
        monkeypatch: pytest.MonkeyPatch,
        block_size: int = 1,
        timeout_s: float = 60.0,
    ) -> None:
        self.here = threading.local()
        self.block_size, self.timeout_s = block_size, timeout_s
        self.node = FakeNode()
        network, kernels = fake_gpu.Network(world_size), fake_gpu.Kernels()
        memories = [FakeDeviceMemory(self.node, rank) for rank in range(world_size)]
        self.gpus = [fake_gpu.FakeGpu(rank, network, kernels, memory=memories[rank]) for rank in range(world_size)]
        for place in (module, carrier, events, libraries, contribution, device_access, host_words, ipc):
            monkeypatch.setattr(place, "driver", lambda: self.here.gpu)
        monkeypatch.setattr(carrier, "nccl", lambda: self.here.gpu)
        monkeypatch.setattr(carrier, "NcclCommunicator", Nccl)
        self.store: Any = HashStore()
        self.communicators: list[Any] = [None] * world_size
        self.on_each(lambda rank: self._make(rank, world_size, options, kernels))

    def _make(self, rank: int, world_size: int, options: Options, kernels: fake_gpu.Kernels) -> None:
        known: Any = Kernels(rank, kernels)
        member = Membership(
            "fake", lambda name: PrefixStore(name, self.store), rank, world_size, self.block_size, options,
            lambda: None, self.timeout_s,
        )  # fmt: skip
        mover = Mover(self.gpus[rank]) if options.cuda_path == "reference" else None
        self.communicators[rank] = CudaCommunicator(member, known, Room, mover)

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


def memory(array: Any) -> Any:
    return DeviceMemory(array.ctypes.data, array.nbytes)


def run(world: World, call: Call, given: list[Any], **more: Any) -> list[Any]:
    """One collective in place on all ranks; copies of what they have afterwards."""
    data = [inputs.bits(array).copy() for array in given]
    factors = more.pop("factors", [None] * len(given))

    def run(rank: int) -> Any:
        request = Request(call, memory(data[rank]), memory(data[rank]), factors[rank])
        arguments = {"streams": STREAMS, "capturing": False, "timeout_s": 60.0, "kept": []} | more
        world.communicators[rank].run_many([request], **arguments)
        return data[rank]

    return world.on_each(run)
