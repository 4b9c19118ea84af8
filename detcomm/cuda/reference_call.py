# SPDX-License-Identifier: Apache-2.0
"""A program issued operation by operation from Python, its bytes moved by the public calls of a stock group.

The reference for ``dc_cuda_issue``: the same operations in the same order on the same streams, so the same bits; slower
by the time of the host. Knows how a program is read; neither torch nor NCCL.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from detcomm.cuda import native
from detcomm.cuda.events import EventPool
from detcomm.cuda.libraries import Library
from detcomm.cuda.native_call import NativeCall, Order, Streams
from detcomm.cuda.program import Program
from detcomm.memory import DeviceMemory


class Parcel(NamedTuple):
    """Memory that goes to a peer, or comes from one."""

    peer: int
    memory: DeviceMemory


class Mover(Protocol):
    """Moves bytes of device memory on a stream, without arithmetic."""

    def copy(self, stream: int, src: DeviceMemory, dst: DeviceMemory) -> None:
        """On this device."""

    def exchange(self, stream: int, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> None:
        """All posted together; those between a pair match in order."""

    def gather(self, stream: int, src: DeviceMemory, dst: DeviceMemory) -> None:
        """What each rank gives, in rank order, to all."""


Launch = Callable[..., None]
"""``Kernels.launch``."""


class ReferenceCall(NativeCall):
    """``NativeCall`` without native code."""

    def __init__(
        self,
        driver: Library,
        pool: EventPool,
        context: int,
        make_current: Callable[[], None],
        launch: Launch,
        mover: Mover,
    ) -> None:
        super().__init__(driver, None, pool, context, make_current)
        self._launch = launch
        self._mover = mover

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
        assert not peers, "the reference path has no peer memory"
        self.follow(order, streams.main)
        for op in program.ops:
            regions = program.regions[op.first_region : op.first_region + op.num_regions]
            memory = [DeviceMemory(buffers[region.buffer] + region.offset, region.num_bytes) for region in regions]
            self._one(op, memory, [region.peer for region in regions], streams[op.stream] or 0)
        if done:
            self._driver.call("cuEventRecord", done, streams.main)
        return True

    def _one(self, op: native.COp, memory: list[DeviceMemory], peers: list[int], stream: int) -> None:
        if op.kind == native.RECORD:
            self._driver.call("cuEventRecord", self._held[op.event].handle, stream)
        elif op.kind == native.WAIT:
            self._driver.call("cuStreamWaitEvent", stream, self._held[op.event].handle, 0)
        elif op.kind == native.FOLD:
            self._fold(op, memory, stream)
        elif op.kind == native.COPY:
            for src, dst in zip(memory[::2], memory[1::2], strict=True):
                self._mover.copy(stream, src, dst)
        elif op.kind == native.GATHER:
            self._mover.gather(stream, memory[0], memory[1])
        else:
            parcels = [Parcel(peer, where) for peer, where in zip(peers, memory, strict=True)]
            self._mover.exchange(stream, parcels[: op.num_sends], parcels[op.num_sends :])

    def _fold(self, op: native.COp, memory: list[DeviceMemory], stream: int) -> None:
        *operands, output = memory
        arguments: list[Any] = [
            (ctypes.c_uint64 * len(operands))(*[operand.start for operand in operands]),
            ctypes.c_uint64(output.start),
            ctypes.c_uint64(op.count),
            ctypes.c_uint64(op.divisor),
        ]
        self._launch(op.kernel, op.num_blocks, stream, *arguments)
