# SPDX-License-Identifier: Apache-2.0
"""Device memory shared by CUDA IPC: a handle of 64 bytes, told through the group's store, opened by the peers.

The driver does not say what becomes of an allocation that its owner frees while a peer has it open. So the owner waits
for its peers' word before it frees, or leaves the memory to the end of its process.
"""

import ctypes
from collections.abc import Sequence

from detcomm.cuda.libraries import IpcHandle, driver
from detcomm.cuda.peer_memory.device_access import DeviceAccess
from detcomm.cuda.peer_memory.meeting import Meeting

_LAZY_ENABLE_PEER_ACCESS = 1


class IpcShare:
    """An own allocation, and the peers'.

    Raises:
        NativeError: the device has no room.
    """

    outlives_its_owner = False

    def __init__(self, access: DeviceAccess, num_bytes: int) -> None:
        self._access = access
        self._opened: list[int] = []
        self.address = access.allocate(num_bytes)
        self._is_freed = False

    def ticket(self) -> str:
        return handle_of(self._access, self.address)

    def map(self, tickets: Sequence[str], meeting: Meeting, deadline: float) -> tuple[int, ...]:
        addresses = []
        for index, ticket in enumerate(tickets):
            if index == meeting.index:
                addresses.append(self.address)
            else:
                addresses.append(open_handle(self._access, ticket))
                self._opened.append(addresses[-1])
        return tuple(addresses)

    def unmap(self) -> None:
        while self._opened:
            close_handle(self._access, self._opened.pop())

    def free(self) -> None:
        if not self._is_freed:
            self._is_freed = True
            self._access.free(self.address)


def handle_of(access: DeviceAccess, address: int) -> str:
    """The handle, as hexadecimal digits, of the allocation that begins at an address.

    Raises:
        NativeError: it cannot be shared so: it was not made by ``cuMemAlloc``, or the platform has no CUDA IPC.
    """
    handle = IpcHandle()
    with access.current():
        driver().call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return bytes(handle).hex()


def open_handle(access: DeviceAccess, handle: str) -> int:
    """Map a peer's allocation; opened more than once, it has one address and counts.

    Raises:
        NativeError: the peer's device is out of reach, or is this process's own.
    """
    address = ctypes.c_void_p()
    with access.current():
        value = IpcHandle.from_buffer_copy(bytes.fromhex(handle))
        driver().call("cuIpcOpenMemHandle_v2", ctypes.byref(address), value, _LAZY_ENABLE_PEER_ACCESS)
    assert address.value is not None
    return address.value


def close_handle(access: DeviceAccess, address: int) -> None:
    """Give up what ``open_handle`` gave."""
    with access.current():
        driver().call("cuIpcCloseMemHandle", address)
