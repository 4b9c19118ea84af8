# SPDX-License-Identifier: Apache-2.0
"""Memory made by the driver's virtual memory functions, shared by file descriptors.

Torch's symmetric memory and ``ncclMemAlloc`` make such memory, which has no CUDA IPC handle. The descriptors go through
sockets of the host's network namespace; who may not know a socket's name is told nothing.
"""

import ctypes
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence

from detcomm.cuda.libraries import driver
from detcomm.cuda.peer_memory.device_access import DeviceAccess
from detcomm.errors import TransportError

_FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
MOST_DESCRIPTORS = 250
"""In one message of a socket; Linux takes 253."""


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location_type", ctypes.c_int), ("location", ctypes.c_int), ("flags", ctypes.c_int))


def export_descriptor(access: DeviceAccess, address: int) -> int:
    """A descriptor of the allocation that is mapped at an address; the caller closes it.

    Raises:
        NativeError: it is none, or was made without the wish to be shared.
    """
    handle, descriptor = ctypes.c_uint64(), ctypes.c_int(-1)
    with access.current():
        driver().call("cuMemRetainAllocationHandle", ctypes.byref(handle), address)
        try:
            driver().call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle.value, _FILE_DESCRIPTOR, 0)
        finally:
            driver().call("cuMemRelease", handle.value)
    return descriptor.value


class VirtualMapping:
    """A peer's allocation, mapped here.

    Args:
        device: whose kernels read it, by its number in this process.
        descriptor: of the allocation; the caller closes it.
        num_bytes: the whole of it.

    Raises:
        NativeError: the peer's device is out of reach.
    """

    def __init__(self, access: DeviceAccess, device: int, descriptor: int, num_bytes: int) -> None:
        self._access = access
        self._num_bytes = num_bytes
        handle, address = ctypes.c_uint64(), ctypes.c_void_p()
        may = _Access(_DEVICE, device, _READ_AND_WRITE)
        with access.current():
            driver().call("cuMemImportFromShareableHandle", ctypes.byref(handle), descriptor, _FILE_DESCRIPTOR)
            try:
                driver().call("cuMemAddressReserve", ctypes.byref(address), num_bytes, 0, None, 0)
                try:
                    driver().call("cuMemMap", address.value, num_bytes, 0, handle.value, 0)
                    try:
                        driver().call("cuMemSetAccess", address.value, num_bytes, ctypes.byref(may), 1)
                    except BaseException:
                        driver().call("cuMemUnmap", address.value, num_bytes)
                        raise
                except BaseException:
                    driver().call("cuMemAddressFree", address.value, num_bytes)
                    raise
            finally:
                driver().call("cuMemRelease", handle.value)  # the mapping keeps the memory
        assert address.value is not None
        self.address: int = address.value

    def close(self) -> None:
        """Unmap."""
        with self._access.current():
            driver().call("cuMemUnmap", self.address, self._num_bytes)
            driver().call("cuMemAddressFree", self.address, self._num_bytes)


class DescriptorOffer:
    """Descriptors of this rank that each of its peers fetches once.

    Listens from the start, so that peers who have read its name can connect before it has seen them.

    Attributes:
        name: by which peers find it; empty if there is nothing to fetch.

    Args:
        descriptors: closed with the offer.
    """

    def __init__(self, descriptors: Sequence[int], num_peers: int) -> None:
        self._descriptors = list(descriptors)
        self._num_peers = num_peers
        self._listener: socket.socket | None = None
        self.name = ""
        if descriptors:
            self.name = f"detcomm-{secrets.token_hex(16)}"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(f"\0{self.name}")
            self._listener.listen(num_peers)

    def serve(self, deadline: float) -> None:
        """Give the descriptors to each peer.

        Raises:
            TransportError: not all peers came by ``deadline``.
        """
        if self._listener is None:
            return
        try:
            for _ in range(self._num_peers):
                self._listener.settimeout(max(deadline - time.monotonic(), 0.01))
                line, _ = self._listener.accept()
                with line:
                    _, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                    if user == os.getuid():
                        socket.send_fds(line, [b"."], self._descriptors)
        except OSError as error:
            raise TransportError(f"a peer did not fetch the descriptors of this rank's memory: {error}") from error

    def close(self) -> None:
        """Close the socket and the descriptors. Idempotent."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        while self._descriptors:
            os.close(self._descriptors.pop())


class DescriptorRequest:
    """A connection to a peer's offer, made before anybody serves: so no two ranks wait for each other."""

    def __init__(self, name: str) -> None:
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._line.connect(f"\0{name}")
        except OSError as error:
            self._line.close()
            raise TransportError(f"no connection to a peer for the descriptors of its memory: {error}") from error

    def fetch(self, deadline: float) -> list[int]:
        """The peer's descriptors; the caller closes them.

        Raises:
            TransportError: they did not come by ``deadline``.
        """
        try:
            self._line.settimeout(max(deadline - time.monotonic(), 0.01))
            content, descriptors, _, _ = socket.recv_fds(self._line, 1, MOST_DESCRIPTORS)
        except OSError as error:
            raise TransportError(f"the descriptors of a peer's memory did not come: {error}") from error
        if not content:
            raise TransportError("a peer closed the connection for the descriptors of its memory")
        return descriptors

    def close(self) -> None:
        """Idempotent."""
        self._line.close()
