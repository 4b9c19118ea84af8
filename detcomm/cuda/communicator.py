# SPDX-License-Identifier: Apache-2.0
"""The collectives of one group on one device: plans made ready, scratch, and one native call for each.

As ``detcomm.communicator`` is for host memory; but a call returns when its work is in the stream, and nothing here
waits for the GPU. One plan at a time is issued to a device, whatever group and thread it comes from: two communicators
whose operations were mixed in different orders on two ranks would wait for each other for ever.

Knows torch only through the two functions that it is given: one allocates, one says whether a graph is captured.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from detcomm.call import Call
from detcomm.communicator import Request
from detcomm.cuda import native
from detcomm.cuda.bounded_plan import bounded_plan
from detcomm.cuda.device import device_lock
from detcomm.cuda.events import Event, EventPool
from detcomm.cuda.in_flight import InFlight, InFlightQueue
from detcomm.cuda.kernels import Kernels, copy_blocks
from detcomm.cuda.libraries import driver, nccl, relaxed_capture
from detcomm.cuda.nccl import NcclCommunicator
from detcomm.cuda.program import Compiler, Program, failure_text, make_program
from detcomm.cuda.sizes import Sizes
from detcomm.cuda.stream_order import NUM_EVENTS
from detcomm.errors import NativeError, PeerTimeoutError, TransportError
from detcomm.memory import DeviceMemory, device_may_run_in_place
from detcomm.options import Options

_CACHED_PROGRAMS = 256
_ALIGNMENT_BYTES = 256


class Block(Protocol):
    """Device memory while somebody holds it: a tensor."""

    def data_ptr(self) -> int: ...


class Streams(NamedTuple):
    """Where a call runs.

    Attributes:
        main: its stream.
        side: for the folds of pipelined plans.
        caller: the stream that ``main`` continues, where that is another one.
    """

    main: int
    side: int
    caller: int | None = None


class CudaCommunicator:
    """Runs collectives over one NCCL communicator, on one device.

    Args:
        name: of the group, for messages.
        store: a key space of this group and device alone.
        options: equal on all ranks.
        block_size: ranks of one aligned block that share a host; speed only.
        allocate: gives device memory, of the graph's own pool while one is captured.
        failure: the group's first error, once there is one.
    """

    def __init__(
        self,
        name: str,
        store: Any,
        rank: int,
        world_size: int,
        options: Options,
        block_size: int,
        kernels: Kernels,
        allocate: Callable[[int], Block],
        failure: Callable[[], BaseException | None],
        timeout_s: float,
    ) -> None:
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.kernels = kernels
        self.sequence = 0
        self.has_captured = False
        self._options = options
        self._block_size = block_size
        self._allocate = allocate
        self._pool = EventPool()
        self._in_flight = InFlightQueue()
        self._scratch: Block | None = None
        self._scratch_start = 0
        self._scratch_bytes = 0
        self._retired: list[Any] = []
        self._last: tuple[int, Event] | None = None
        self._programs = lru_cache(maxsize=_CACHED_PROGRAMS)(self._make_program)
        self._nccl: NcclCommunicator | None = None
        if world_size > 1:
            self._nccl = NcclCommunicator(store, rank, world_size, kernels.make_current, failure, timeout_s)
        kernels.make_current()
        self._functions = native.functions_of(driver(), nccl() if world_size > 1 else None)
        self._issue = native.library().dc_cuda_issue
        self._event_objects = [self._pool.take() for _ in range(NUM_EVENTS)]
        self._events = (ctypes.c_void_p * NUM_EVENTS)(*[event.handle for event in self._event_objects])
        self._begin = self._pool.take()
        self._call = native.CCall(events=ctypes.addressof(self._events))
        self._failure_place = native.CFailure()
        self._sizes = Sizes(rank, world_size)

    def run_many(
        self, requests: Sequence[Request], streams: Streams, *, capturing: bool, timeout_s: float, kept: list[Any]
    ) -> Event:
        """Issue several collectives, each reduced by itself.

        Args:
            requests: of device memory.
            capturing: whether ``streams.main`` is part of a graph that is being captured.
            timeout_s: for the GPU to be done, from now.
            kept: kept alive until the GPU is done, or until the caller empties the list; grows by a graph's scratch.

        Returns:
            An event behind the last of it on ``streams.main``.

        Raises:
            UsageError: sizes do not fit; nothing was issued.
            TransportError: NCCL or CUDA refused; the group is unusable.
        """
        for request in requests:
            self._sizes.check(request)
        with device_lock(self.kernels.device):
            self.kernels.make_current()
            restore = relaxed_capture() if capturing else None
            try:
                programs = [self._programs(request.call) for request in requests]
            finally:
                if restore is not None:
                    restore()
            done = self._pool.take()
            try:
                self._order(streams, capturing)
                for request, program in zip(requests, programs, strict=True):
                    self.sequence += 1
                    self._run(request, program, streams, capturing, kept)
                done.record(streams.main)
            except NativeError as error:
                self.abort()
                raise TransportError(f"group {self.name}, collective #{self.sequence}: {error}") from error
            if capturing:
                self.has_captured = True
            else:
                self._last = (streams.main, done)
                self._keep(requests, done, timeout_s, kept)
            return done

    def poll(self) -> None:
        """Let go of what is done, and look for what will never be. Called again and again, from any thread.

        Raises:
            PeerTimeoutError: the oldest call is not done in time.
            TransportError: NCCL or the device has failed.
        """
        restore = relaxed_capture()
        try:
            self.kernels.make_current()
            oldest = self._in_flight.let_go()
            if self._nccl is not None:
                self._nccl.check()
        except NativeError as error:
            raise TransportError(f"group {self.name}: {error}") from error
        finally:
            restore()
        if oldest is not None and time.monotonic() > oldest.deadline:
            raise PeerTimeoutError(
                f"group {self.name}: collective #{oldest.sequence}, {oldest.text}, is not done on the GPU of rank "
                f"{self.rank} within its timeout"
            )

    @property
    def oldest(self) -> InFlight | None:
        """The call that the GPU is at, if any."""
        return self._in_flight.oldest

    def abort(self) -> None:
        """End what runs on the GPU; its results are garbage. From any thread."""
        if self._nccl is not None:
            self._nccl.abort()

    def close(self) -> None:
        """Release everything; the GPU is done with it."""
        if self._nccl is not None:
            self._nccl.close()
        self._programs.cache_clear()
        self._in_flight.clear()
        self._scratch, self._scratch_bytes = None, 0

    # -- one call -----------------------------------------------------------------------------------------------

    def _order(self, streams: Streams, capturing: bool) -> None:
        """Behind the caller's work, and behind the last call that used the same scratch."""
        if streams.caller is not None:
            self._begin.record(streams.caller)
            self._begin.make_wait(streams.main)
        if not capturing and self._last is not None and self._last[0] != streams.main:
            self._last[1].make_wait(streams.main)

    def _run(
        self, request: Request, program: Program | None, streams: Streams, capturing: bool, kept: list[Any]
    ) -> None:
        if program is None:
            self._run_alone(request, streams.main)
            return
        input, output = _memory(request.input), _memory(request.output)
        plan_bytes = -(-program.plan.scratch_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        is_staged = request.factor is not None or not device_may_run_in_place(request.call, self.rank, input, output)
        scratch = self._scratch_of(plan_bytes + (input.size if is_staged else 0), capturing, kept)
        if is_staged:
            staged = DeviceMemory(scratch + plan_bytes, input.size)
            self._move(request, input, staged, streams.main)
            input = staged
        native_call = self._call
        native_call.comm = self._nccl.handle if self._nccl is not None else None
        native_call.streams[:] = streams[:2]
        native_call.buffers[:] = (input.start, output.start, scratch)
        if self._issue(
            ctypes.byref(program.structure),
            ctypes.byref(self._functions),
            ctypes.byref(native_call),
            ctypes.byref(self._failure_place),
        ):
            raise NativeError(failure_text(program, self._failure_place, driver().describe))

    def _run_alone(self, request: Request, stream: int) -> None:
        """Nothing to exchange: an empty message, or a world of one rank, where every bit stays."""
        if self.world_size == 1 and request.call.count:
            self._move(request, _memory(request.input), _memory(request.output), stream)

    def _move(self, request: Request, src: DeviceMemory, dst: DeviceMemory, stream: int) -> None:
        """Copy, or what the sender of a PREMUL_SUM does."""
        if request.factor is None:
            if src.start != dst.start:
                driver().call("cuMemcpyDtoDAsync_v2", dst.start, src.start, src.size, stream)
            return
        dtype = request.call.dtype
        count = src.size // dtype.itemsize
        self.kernels.launch(
            self.kernels.premultiply(dtype),
            self.kernels.fold_blocks(count, dtype.itemsize),
            stream,
            ctypes.c_uint64(src.start),
            ctypes.c_uint64(dst.start),
            ctypes.c_uint64(count),
            ctypes.c_double(request.factor),
        )

    def _scratch_of(self, num_bytes: int, capturing: bool, kept: list[Any]) -> int:
        """Scratch that stays from call to call; a graph has its own, since it may run beside everything."""
        if not num_bytes:
            return 0
        if capturing:
            own = self._allocate(num_bytes)
            kept.append(own)
            return own.data_ptr()
        if self._scratch is None or self._scratch_bytes < num_bytes:
            self._retired.append(self._scratch)  # earlier calls may still use it, and end before this one does
            self._scratch_bytes = max(num_bytes, min(2 * self._scratch_bytes, self._options.scratch_bytes))
            self._scratch = self._allocate(self._scratch_bytes)
            self._scratch_start = self._scratch.data_ptr()
        return self._scratch_start

    def _keep(self, requests: Sequence[Request], done: Event, timeout_s: float, kept: list[Any]) -> None:
        first = requests[0]
        deadline = time.monotonic() + timeout_s
        self._in_flight.add(
            InFlight(self.sequence, first.call, first.label, len(requests) - 1, done, deadline, [kept, *self._retired])
        )
        self._retired = []

    # -- programs -----------------------------------------------------------------------------------------------

    def _make_program(self, call: Call) -> Program | None:
        if self.world_size == 1 or not call.count:
            return None
        kernels = self.kernels
        compiler = Compiler(kernels.fold, kernels.fold_blocks, kernels.copy, copy_blocks)
        return make_program(bounded_plan(call, self.rank, self.world_size, self._options, self._block_size), compiler)


def _memory(memory: Any) -> DeviceMemory:
    assert isinstance(memory, DeviceMemory), "a request of host memory on a GPU"
    return memory
