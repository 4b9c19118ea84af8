# SPDX-License-Identifier: Apache-2.0
"""Device memory of one device: allocated, zeroed, read and written through a stream of its own.

Of its own and non-blocking, since a caller's stream may hold a kernel that waits for a peer, which waits for us here.
The functions of the driver that are not allowed while a graph is captured are allowed to this thread meanwhile.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from detcomm.cuda.libraries import driver, relaxed_capture

_NON_BLOCKING = 1


class DeviceAccess:
    """What this package does to the memory of one device.

    Args:
        make_current: makes the device's context this thread's.
    """

    def __init__(self, make_current: Callable[[], None]) -> None:
        self._make_current = make_current
        stream = ctypes.c_void_p()
        with self.current():
            driver().call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        self._stream = stream

    @contextmanager
    def current(self) -> Iterator[None]:
        """The device's context is this thread's, and a capture elsewhere refuses nothing."""
        self._make_current()
        restore = relaxed_capture()
        try:
            yield
        finally:
            restore()

    def allocate(self, num_bytes: int) -> int:
        """The address of a driver's allocation of its own, of 2 MiB or more, so that a handle of it shows nothing else.

        Raises:
            NativeError: the device has no room.
        """
        address = ctypes.c_void_p()
        with self.current():
            driver().call("cuMemAlloc_v2", ctypes.byref(address), max(num_bytes, LEAST_BYTES))
        assert address.value is not None
        return address.value

    def free(self, address: int) -> None:
        """Give back what ``allocate`` gave. Waits for what runs on the device."""
        with self.current():
            driver().call("cuMemFree_v2", address)

    def zero(self, address: int, num_bytes: int) -> None:
        """Zero, and be done with it."""
        with self.current():
            driver().call("cuMemsetD8Async", address, 0, num_bytes, self._stream)
            driver().call("cuStreamSynchronize", self._stream)

    def read(self, address: int, num_bytes: int) -> bytes:
        """A copy of what lies there now."""
        room = ctypes.create_string_buffer(num_bytes)
        with self.current():
            driver().call("cuMemcpyDtoHAsync_v2", room, address, num_bytes, self._stream)
            driver().call("cuStreamSynchronize", self._stream)
        return room.raw

    def write(self, address: int, content: bytes) -> None:
        """Put ``content`` there, and be done with it."""
        room = ctypes.create_string_buffer(content, len(content))
        with self.current():
            driver().call("cuMemcpyHtoDAsync_v2", address, room, len(content), self._stream)
            driver().call("cuStreamSynchronize", self._stream)

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Begin and bytes of the driver's allocation that holds an address.

        Raises:
            NativeError: it is in none.
        """
        begin, num_bytes = ctypes.c_void_p(), ctypes.c_size_t()
        with self.current():
            driver().call("cuMemGetAddressRange_v2", ctypes.byref(begin), ctypes.byref(num_bytes), address)
        assert begin.value is not None
        return begin.value, num_bytes.value

    def close(self) -> None:
        """Give the stream back."""
        with self.current():
            driver().call("cuStreamDestroy_v2", self._stream)


LEAST_BYTES = 2 << 20
"""Of an own allocation: the driver puts smaller ones beside each other into one, which a handle shows as a whole."""
