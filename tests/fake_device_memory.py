# SPDX-License-Identifier: Apache-2.0
"""Device memory and its sharing by handles made of host memory, as the driver's functions: one node, a rank a thread.

Each allocation is an anonymous file, and each opening of its handle another mapping of it: so addresses differ from
rank to rank, as on a device. What the real driver leaves undefined is noted as a violation.
"""

import contextlib
import ctypes
import mmap
import os
import secrets
import threading
from dataclasses import dataclass, field
from typing import Any

from detcomm.cuda.libraries import IpcHandle
from detcomm.errors import NativeError
from detcomm.transports.memory_segment import Mapping

INVALID_VALUE = 1
_MAP_FIXED = 0x10


@dataclass
class Allocation:
    """One allocation of one rank."""

    owner: int
    num_bytes: int
    mapping: Mapping
    descriptor: int
    num_openings: int = 0
    is_virtual: bool = False
    """Whether it has descriptors instead of a handle."""


@dataclass
class FakeNode:
    """What all ranks of a node share.

    Attributes:
        violations: what a rank did and must not.
        confused: ranks to which the driver gives other memory than the handle's.
    """

    violations: list[str] = field(default_factory=list)
    confused: set[int] = field(default_factory=set)
    allocations: dict[int, Allocation] = field(default_factory=dict)
    by_handle: dict[bytes, int] = field(default_factory=dict)
    openings: dict[tuple[int, int], tuple[Mapping, int, int]] = field(default_factory=dict)
    num_host_words: int = 0
    num_streams: int = 0
    lock: Any = field(default_factory=threading.RLock)

    @property
    def num_left(self) -> int:
        """What has not been given back."""
        return len(self.allocations) + len(self.openings) + self.num_host_words + self.num_streams


class FakeDeviceMemory:
    """One rank's functions of the driver, by name.

    Attributes:
        fails: a function that fails when it is called, and its code.
        gates: a function that waits, as for a kernel that runs, and for what.
        calls: the functions called.
        fails_at: the number of the call that fails, counted from 0.
    """

    def __init__(self, node: FakeNode, rank: int) -> None:
        self.node = node
        self.rank = rank
        self.fails: dict[str, int] = {}
        self.gates: dict[str, threading.Event] = {}
        self.calls: list[str] = []
        self.fails_at: int | None = None
        self._host: dict[int, Any] = {}

    def __contains__(self, name: str) -> bool:
        return hasattr(self, f"_{name}")

    def __getitem__(self, name: str) -> Any:
        function = getattr(self, f"_{name}")

        def called(*args: Any) -> int:
            if name in self.gates:
                assert self.gates[name].wait(60.0)
            with self.node.lock:
                if name != "cuThreadExchangeStreamCaptureMode":  # which has nothing to fail by
                    self.calls.append(name)
                    if len(self.calls) - 1 == self.fails_at:
                        return INVALID_VALUE
                return self.fails.get(name) or int(function(*args) or 0)

        return called

    def call(self, name: str, *args: Any) -> None:
        """As ``Library.call``."""
        code = self[name](*args)
        if code:
            raise NativeError(f"CUDA driver: {name} failed: error {code}")

    def _cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:
        pass

    def _cuStreamCreate(self, stream: Any, flags: int) -> None:
        assert flags == 1, "a stream that waits for the legacy one"
        self.node.num_streams += 1
        _put(stream, 0xF000 + self.rank)

    def _cuStreamDestroy_v2(self, stream: Any) -> None:
        self.node.num_streams -= 1

    def _cuStreamSynchronize(self, stream: Any) -> None:
        pass

    def _cuMemAlloc_v2(self, address: Any, num_bytes: int) -> None:
        descriptor = os.memfd_create("fake device memory")
        os.ftruncate(descriptor, num_bytes)
        mapping = Mapping(descriptor, num_bytes)
        ctypes.memset(mapping.address, 0xA5, num_bytes)
        self.node.allocations[mapping.address] = Allocation(self.rank, num_bytes, mapping, descriptor)
        _put(address, mapping.address)

    def _cuMemFree_v2(self, address: int) -> int:
        allocation = self.node.allocations.pop(address, None)
        if allocation is None:
            return INVALID_VALUE
        if allocation.num_openings:
            self.node.violations.append(f"rank {self.rank} frees memory that {allocation.num_openings} have open")
        os.close(allocation.descriptor)
        allocation.mapping.close()
        return 0

    def _cuMemGetAddressRange_v2(self, begin: Any, size: Any, address: int) -> int:
        for start, allocation in self.node.allocations.items():
            if start <= address < start + allocation.num_bytes:
                _put(begin, start)
                ctypes.cast(size, ctypes.POINTER(ctypes.c_size_t))[0] = allocation.num_bytes
                return 0
        return INVALID_VALUE

    def _cuMemsetD8Async(self, address: int, value: int, num_bytes: int, stream: Any) -> None:
        ctypes.memset(address, value, num_bytes)

    def _cuMemcpyDtoHAsync_v2(self, dst: Any, src: int, num_bytes: int, stream: Any) -> None:
        ctypes.memmove(dst, src, num_bytes)

    def _cuMemcpyHtoDAsync_v2(self, dst: int, src: Any, num_bytes: int, stream: Any) -> None:
        ctypes.memmove(dst, src, num_bytes)

    def _cuMemHostAlloc(self, address: Any, num_bytes: int, flags: int) -> None:
        assert flags == 3, "portable and mapped"
        room = (ctypes.c_uint8 * num_bytes)(*[0xA5] * num_bytes)
        self._host[ctypes.addressof(room)] = room
        self.node.num_host_words += 1
        _put(address, ctypes.addressof(room))

    def _cuMemHostGetDevicePointer_v2(self, device: Any, host: Any, flags: int) -> None:
        _put(device, host.value)

    def _cuMemFreeHost(self, address: int) -> None:
        del self._host[address]
        self.node.num_host_words -= 1

    def _cuIpcGetMemHandle(self, handle: Any, address: int) -> int:
        if address not in self.node.allocations or self.node.allocations[address].is_virtual:
            return INVALID_VALUE
        name = secrets.token_bytes(64)
        self.node.by_handle[name] = address
        ctypes.memmove(handle, name, 64)
        return 0

    def _cuIpcOpenMemHandle_v2(self, address: Any, handle: IpcHandle, flags: int) -> int:
        assert flags == 1, "enables access to peers"
        start = self.node.by_handle.get(bytes(handle))
        allocation = self.node.allocations.get(start or 0)
        if start is None or allocation is None or allocation.owner == self.rank:
            return INVALID_VALUE
        if self.rank in self.node.confused:
            start, allocation = next(
                (other, mine) for other, mine in self.node.allocations.items() if mine.owner == self.rank
            )
        allocation.num_openings += 1
        for (rank, at), (mapping, count, of) in self.node.openings.items():
            if rank == self.rank and of == start:  # once more: the same address
                self.node.openings[rank, at] = (mapping, count + 1, of)
                _put(address, at)
                return 0
        mapping = Mapping(allocation.descriptor, allocation.num_bytes)
        self.node.openings[self.rank, mapping.address] = (mapping, 1, start)
        _put(address, mapping.address)
        return 0

    def _cuIpcCloseMemHandle(self, address: int) -> int:
        opening = self.node.openings.pop((self.rank, address), None)
        if opening is None:
            return INVALID_VALUE
        mapping, count, start = opening
        if start in self.node.allocations:
            self.node.allocations[start].num_openings -= 1
        if count > 1:
            self.node.openings[self.rank, address] = (mapping, count - 1, start)
        else:
            mapping.close()
        return 0

    # An allocation's handle is its address, an imported one's the descriptor.

    def _cuMemRetainAllocationHandle(self, handle: Any, address: int) -> int:
        allocation = self.node.allocations.get(address)
        if allocation is None or not allocation.is_virtual:
            return INVALID_VALUE
        _put(handle, address)
        return 0

    def _cuMemExportToShareableHandle(self, descriptor: Any, handle: int, kind: int, flags: int) -> None:
        assert (kind, flags) == (1, 0)
        copied = os.dup(self.node.allocations[handle].descriptor)
        ctypes.cast(descriptor, ctypes.POINTER(ctypes.c_int))[0] = copied

    def _cuMemImportFromShareableHandle(self, handle: Any, descriptor: int, kind: int) -> None:
        assert kind == 1
        _put(handle, os.dup(descriptor))

    def _cuMemRelease(self, handle: int) -> None:
        if handle < 1 << 20:
            os.close(handle)

    def _cuMemAddressReserve(self, address: Any, num_bytes: int, alignment: int, wish: Any, flags: int) -> None:
        assert (alignment, wish, flags) == (0, None, 0)
        descriptor = os.memfd_create("fake reservation")
        os.ftruncate(descriptor, num_bytes)
        mapping = Mapping(descriptor, num_bytes)
        os.close(descriptor)
        self.node.openings[self.rank, mapping.address] = (mapping, 1, 0)
        _put(address, mapping.address)

    def _cuMemAddressFree(self, address: int, num_bytes: int) -> None:
        mapping, _, _ = self.node.openings.pop((self.rank, address))
        mapping.close()

    def _cuMemMap(self, address: int, num_bytes: int, offset: int, handle: int, flags: int) -> None:
        assert (offset, flags, os.fstat(handle).st_size) == (0, 0, num_bytes)
        _map_at(address, num_bytes, handle)

    def _cuMemUnmap(self, address: int, num_bytes: int) -> None:
        descriptor = os.memfd_create("fake reservation")
        os.ftruncate(descriptor, num_bytes)
        _map_at(address, num_bytes, descriptor)
        os.close(descriptor)

    def _cuMemSetAccess(self, address: int, num_bytes: int, access: Any, count: int) -> None:
        assert count == 1
        assert list(ctypes.cast(access, ctypes.POINTER(ctypes.c_int))[:3]) == [1, 0, 3]


def num_descriptors(name: str) -> int:
    """How many of this process's descriptors are of files whose paths have this in them."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, by another thread
            found += name in os.readlink(f"/proc/self/fd/{number}")
    return found


def _map_at(address: int, num_bytes: int, descriptor: int) -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    fixed = libc.mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0)
    assert fixed == address


def _put(where: Any, value: int) -> None:
    ctypes.cast(where, ctypes.POINTER(ctypes.c_void_p))[0] = value
