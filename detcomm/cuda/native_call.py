# SPDX-License-Identifier: Apache-2.0
"""One native call a collective: what stays the same from call to call is kept ready, the rest is packed into one block.

Knows addresses, streams and events; neither tensors nor plans. One thread at a time uses it.
"""

import ctypes
import struct
from collections.abc import Callable
from typing import NamedTuple

from detcomm.cuda import native
from detcomm.cuda.events import EventPool
from detcomm.cuda.libraries import Library
from detcomm.cuda.program import Program
from detcomm.cuda.stream_order import NUM_EVENTS

_CALL = struct.Struct("13P")
"""``dc_cuda_call``: packing it whole takes a tenth of the time of setting the fields of a ctypes structure."""


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


class Order(NamedTuple):
    """What comes before a call, as ``dc_cuda_call`` has it; zeros for nothing."""

    caller: int
    begin: int
    after: int


IN_ORDER = Order(0, 0, 0)
"""The stream itself keeps the order."""


class NativeCall:
    """``dc_cuda_issue``, ready to call.

    Args:
        driver: the CUDA driver.
        nccl: NCCL; ``None`` where nothing is exchanged.
        context: of the device.
        make_current: makes it this thread's.
    """

    def __init__(
        self,
        driver: Library,
        nccl: Library | None,
        pool: EventPool,
        context: int,
        make_current: Callable[[], None],
    ) -> None:
        self._driver = driver
        self._context = context
        self._make_current = make_current
        self._issue = native.library().dc_cuda_issue
        self._functions = native.functions_of(driver, nccl)
        self._held = [pool.take(make_current) for _ in range(NUM_EVENTS)]
        self._events = (ctypes.c_void_p * NUM_EVENTS)(*[event.handle for event in self._held])
        self._begin = pool.take(make_current)
        self._memory = (ctypes.c_char * _CALL.size)()
        self.failure = native.CFailure()
        self._functions_address = ctypes.addressof(self._functions)
        self._events_address = ctypes.addressof(self._events)
        self._memory_address = ctypes.addressof(self._memory)
        self._failure_address = ctypes.addressof(self.failure)

    def order(self, streams: Streams, after: int) -> Order:
        """Behind the caller's stream, and behind an event unless it is 0."""
        if streams.caller is None:
            return Order(0, 0, after) if after else IN_ORDER
        return Order(streams.caller, self._begin.handle, after)

    def issue(
        self,
        program: Program,
        comm: int,
        streams: Streams,
        buffers: tuple[int, int, int],
        order: Order,
        done: int,
        peers: int = 0,
    ) -> bool:
        """Issue a program; false if a function failed, which ``failure`` names.

        Args:
            comm: the NCCL communicator.
            buffers: the addresses of input, output and scratch.
            done: an event to record behind it, or 0.
            peers: the address of a ``dc_cuda_peers``, for a program that has to do with peers' memory.
        """
        _CALL.pack_into(
            self._memory, 0, comm, *streams[:2], self._events_address, *buffers, *order, done, self._context, peers
        )
        code: int = self._issue(program.address, self._functions_address, self._memory_address, self._failure_address)
        return code == 0

    def follow(self, order: Order, stream: int) -> None:
        """What native code does at the begin of a program, for what comes before one."""
        self._make_current()
        if order.begin:
            self._driver.call("cuEventRecord", order.begin, order.caller)
            self._driver.call("cuStreamWaitEvent", stream, order.begin, 0)
        if order.after:
            self._driver.call("cuStreamWaitEvent", stream, order.after, 0)
