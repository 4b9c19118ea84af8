# SPDX-License-Identifier: Apache-2.0
"""A GPU and an NCCL made of host memory, as the table of functions that ``dc_cuda_issue`` calls.

Streams do their work when it is issued; what would have run at once can be read from ``calls``. Kernels are the CPU's
folds. Each rank is a thread, and messages between them go through queues.
"""

import ctypes
import queue
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from detcomm import native as cpu_native
from detcomm.cuda import native
from detcomm.cuda.program import Compiler, Program
from detcomm.cuda.stream_order import NUM_EVENTS
from detcomm.errors import NativeError
from detcomm.fold import fold
from detcomm.fold_spec import FoldSpec
from tests import fake_peer_kernels, host_kernels


def _is_missing() -> str:
    try:
        native.library()
    except NativeError as error:
        return str(error)
    return ""


needs_native = pytest.mark.skipif(
    bool(_is_missing()) and not cpu_native.available(), reason=f"nothing native was built: {_is_missing()}"
)
"""Where a compiler built the CPU's library it builds this one, too: then a missing one is an error, and no skip."""

TIMEOUT_S = 60.0
COMM = 0xC0
CONTEXT = 0xD0
MAIN_STREAM, SIDE_STREAM = 0xA0, 0xB0
_COPY_KERNEL, _PEER_COPY_KERNEL, _SYNC_KERNEL = 1, 2, 3
_PEER_FOLDS = 10_000
"""Added to the number of a fold whose operands may lie in peers' memory."""
_FUSED = 20_000
"""Added to the number of the fold of a whole call in one launch; alone for a call without one."""

_I, _U, _P, _Z = ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.c_size_t
_TYPES = {
    "ncclGroupStart": ctypes.CFUNCTYPE(_I),
    "ncclGroupEnd": ctypes.CFUNCTYPE(_I),
    "ncclSend": ctypes.CFUNCTYPE(_I, _P, _Z, _I, _I, _P, _P),
    "ncclRecv": ctypes.CFUNCTYPE(_I, _P, _Z, _I, _I, _P, _P),
    "ncclAllGather": ctypes.CFUNCTYPE(_I, _P, _P, _Z, _I, _P, _P),
    "cuLaunchKernel": ctypes.CFUNCTYPE(_I, _P, *[_U] * 7, _P, _P, _P),
    "cuEventRecord": ctypes.CFUNCTYPE(_I, _P, _P),
    "cuStreamWaitEvent": ctypes.CFUNCTYPE(_I, _P, _P, _U),
    "cuCtxSetCurrent": ctypes.CFUNCTYPE(_I, _P),
}


class Network:
    """Messages under way, by source and destination."""

    def __init__(self, world_size: int = 1) -> None:
        self.world_size = world_size
        self.queues: defaultdict[tuple[int, int], queue.SimpleQueue[bytes]] = defaultdict(queue.SimpleQueue)


class Kernels:
    """Kernels are numbers here; what they do is looked up."""

    def __init__(self) -> None:
        self.specs: list[FoldSpec | None] = [None, None, None, None]

    def compiler(self) -> Compiler:
        return Compiler(
            self._fold, lambda count, item_bytes: 1 + count * item_bytes // 4096, self._copy, lambda _: 1,
            lambda spec: self._fold(spec) + _PEER_FOLDS, lambda: _PEER_COPY_KERNEL, lambda _: 1, lambda: _SYNC_KERNEL,
            lambda spec: _FUSED + (0 if spec is None else self._fold(spec)),
        )  # fmt: skip

    def _fold(self, spec: FoldSpec) -> int:
        if spec not in self.specs:
            self.specs.append(spec)
        return self.specs.index(spec)

    def _copy(self) -> int:
        return _COPY_KERNEL

    def run_fold(self, kernel: int, operands: list[int], output: int, count: int, divisor: int) -> None:
        """What a fold kernel does with addresses."""
        spec = self.specs[kernel]
        assert spec is not None
        assert divisor == spec.divisor
        inputs = [bytes_at(operands[k], count * dtype.itemsize) for k, dtype in enumerate(spec.input_dtypes)]
        fold(spec, inputs, bytes_at(output, count * spec.output_dtype.itemsize))


@dataclass
class FakeGpu:
    """One rank's functions.

    Attributes:
        calls: every call, name first.
        fails: a function that fails when it is called, and its code.
    """

    rank: int
    network: Network
    kernels: Kernels
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    fails: dict[str, int] = field(default_factory=dict)
    num_events: int = 0
    capture: int = 0
    """The number of the capture that every stream is part of."""
    memory: Any = None
    """Has the driver's functions for memory, by name."""
    is_stuck: bool = False
    """Whether no event is ever done."""
    _callbacks: dict[str, Any] = field(default_factory=dict)
    _sends: list[tuple[int, bytes]] = field(default_factory=list)
    _recvs: list[tuple[int, int, int]] = field(default_factory=list)

    def run(
        self, program: Program, input: Any, output: Any, *, peers: native.CPeers | None = None, **events: int
    ) -> native.CFailure | None:
        """Issue a program on this rank's memory; how it failed, if it did."""
        scratch = np.full(max(program.scratch_bytes, 1), 0xA5, np.uint8)
        scratch_at = scratch.ctypes.data if peers is None else peers.staging[peers.index]
        handles = (ctypes.c_void_p * NUM_EVENTS)(*range(0xE000, 0xE000 + NUM_EVENTS))
        table = native.Functions(*[self.address(name) for name in native.FUNCTIONS])
        call = native.CCall(
            comm=COMM,
            context=CONTEXT,
            streams=(MAIN_STREAM, SIDE_STREAM),
            events=ctypes.addressof(handles),
            buffers=(input.ctypes.data, output.ctypes.data, scratch_at),
            peers=None if peers is None else ctypes.addressof(peers),
            **events,
        )
        failure = native.CFailure()
        status = native.library().dc_cuda_issue(
            ctypes.byref(program.structure), ctypes.byref(table), ctypes.byref(call), ctypes.byref(failure)
        )
        return failure if status else None

    def address(self, name: str) -> int | None:
        """Where a function lies, as ``Library.address``."""
        if name not in self._callbacks:
            self._callbacks[name] = _TYPES[name](getattr(self, f"_{name}"))
        return ctypes.cast(self._callbacks[name], ctypes.c_void_p).value

    def call(self, name: str, *args: Any) -> None:
        """Call one of the driver's other functions, as ``Library.call``."""
        assert self[name](*args) == 0

    def __getitem__(self, name: str) -> Any:
        return self.memory[name] if self.memory is not None and name in self.memory else getattr(self, f"_{name}")

    def describe(self, code: int) -> str:
        return f"error {code}"

    def _told(self, name: str, *args: Any) -> int:
        self.calls.append((name, *args))
        return self.fails.get(name, 0)

    def _ncclGroupStart(self) -> int:
        return self._told("ncclGroupStart")

    def _ncclSend(self, data: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> int:
        assert (dtype, comm) == (1, COMM)
        self._sends.append((peer, ctypes.string_at(data, count)))
        return self._told("ncclSend", peer, count, stream, data)

    def _ncclRecv(self, data: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> int:
        assert (dtype, comm) == (1, COMM)
        self._recvs.append((peer, data, count))
        return self._told("ncclRecv", peer, count, stream, data)

    def _ncclGroupEnd(self) -> int:
        sends, recvs, self._sends, self._recvs = self._sends, self._recvs, [], []
        code = self._told("ncclGroupEnd")
        if self.fails:
            return code
        for peer, content in sends:
            self.network.queues[self.rank, peer].put(content)
        for peer, data, count in recvs:
            content = self.network.queues[peer, self.rank].get(timeout=TIMEOUT_S)
            assert len(content) == count, f"rank {self.rank} expects {count} bytes from {peer}, got {len(content)}"
            ctypes.memmove(data, content, count)
        return code

    def _ncclAllGather(self, send: int, recv: int, count: int, dtype: int, comm: int, stream: int) -> int:
        assert (dtype, comm) == (1, COMM)
        code = self._told("ncclAllGather", count, stream, send, recv)
        if self.fails:
            return code
        own = ctypes.string_at(send, count)
        for peer in range(self.network.world_size):
            self.network.queues[self.rank, peer].put(own)
        for peer in range(self.network.world_size):
            content = self.network.queues[peer, self.rank].get(timeout=TIMEOUT_S)
            assert len(content) == count, f"rank {self.rank} expects {count} bytes from {peer}, got {len(content)}"
            ctypes.memmove(recv + peer * count, content, count)
        return code

    def _cuLaunchKernel(self, kernel: int, *rest: Any) -> int:
        grid_x, grid_y, grid_z, threads = rest[:4]
        stream, parameters = rest[7], ctypes.cast(rest[8], ctypes.POINTER(ctypes.c_void_p))
        assert grid_x >= 1
        assert (grid_z, threads) == (1, 32 if kernel == _SYNC_KERNEL else 256)
        if kernel == _COPY_KERNEL:
            self._copy(parameters, grid_y)
        elif kernel == _PEER_COPY_KERNEL:
            fake_peer_kernels.copy(parameters, grid_y)
        elif kernel == _SYNC_KERNEL:
            assert (grid_x, grid_y) == (1, 1)
            host_kernels.sync()(parameters[0])
        elif kernel >= _FUSED:
            host_kernels.fused(self.kernels.specs[kernel - _FUSED])(parameters[0], grid_x)
        elif kernel >= _PEER_FOLDS:
            fake_peer_kernels.fold(self.kernels, kernel - _PEER_FOLDS, parameters)
        else:
            self._fold(kernel, parameters)
        return self._told("cuLaunchKernel", kernel, grid_y, stream)

    def _copy(self, parameters: Any, num_copies: int) -> None:
        copies = ctypes.cast(parameters[0], ctypes.POINTER(ctypes.c_uint64))
        most = native.MAX_COPIES
        # Backwards: copies of one launch run in no order.
        for k in reversed(range(num_copies)):
            ctypes.memmove(copies[most + k], copies[k], copies[2 * most + k])

    def _fold(self, kernel: int, parameters: Any) -> None:
        operands = ctypes.cast(parameters[0], ctypes.POINTER(ctypes.c_uint64))
        output, count, divisor = (ctypes.cast(parameters[k], ctypes.POINTER(ctypes.c_uint64))[0] for k in (1, 2, 3))
        spec = self.kernels.specs[kernel]
        assert spec is not None
        self.kernels.run_fold(kernel, operands[: len(spec.leaves)], output, count, divisor)

    def _cuEventRecord(self, event: int, stream: int) -> int:
        return self._told("cuEventRecord", event, stream)

    def _cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> int:
        assert flags == 0
        return self._told("cuStreamWaitEvent", event, stream)

    def _cuCtxSetCurrent(self, context: int) -> int:
        assert context == CONTEXT
        return self._told("cuCtxSetCurrent", context)

    def _cuStreamGetCaptureInfo_v2(self, stream: int, status: Any, number: Any, *nothing: Any) -> int:
        ctypes.cast(status, ctypes.POINTER(ctypes.c_int))[0] = int(self.capture > 0)
        ctypes.cast(number, ctypes.POINTER(ctypes.c_uint64))[0] = self.capture
        return 0

    def _cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        return 0

    def _cuEventCreate(self, handle: Any, flags: int) -> int:
        self.num_events += 1
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = 0xE0000 + self.num_events
        return 0

    def _cuEventQuery(self, event: int) -> int:
        return 600 if self.is_stuck else 0

    def _cuMemcpyDtoDAsync_v2(self, dst: int, src: int, num_bytes: int, stream: int) -> int:
        ctypes.memmove(dst, src, num_bytes)
        return 0


def bytes_at(address: int, num_bytes: int) -> Any:
    """Memory at an address, as an array."""
    return np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), np.uint8)
