# SPDX-License-Identifier: Apache-2.0
"""CUDA events, taken from a pool and back in it when nobody holds them: making one costs more than recording it."""

import ctypes
from collections.abc import Callable

from detcomm.cuda.libraries import driver
from detcomm.errors import NativeError

_DISABLE_TIMING = 2
_NOT_READY = 600


class Event:
    """An event while somebody holds it."""

    __slots__ = ("_free", "handle")

    def __init__(self, handle: int, free: list[int]) -> None:
        self.handle = handle
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.handle)

    def record(self, stream: int) -> None:
        """What is in the stream now is before this event."""
        driver().call("cuEventRecord", self.handle, stream)

    def make_wait(self, stream: int) -> None:
        """What comes to the stream from now on is after this event."""
        driver().call("cuStreamWaitEvent", stream, self.handle, 0)

    def is_done(self) -> bool:
        """Whether the GPU has come past it.

        Raises:
            NativeError: the device has failed.
        """
        code = driver()["cuEventQuery"](self.handle)
        if code in (0, _NOT_READY):
            return bool(code == 0)
        raise NativeError(f"CUDA: {driver().describe(code)}")


class EventPool:
    """Events of one device."""

    def __init__(self) -> None:
        self._free: list[int] = []

    def take(self, make_current: Callable[[], None]) -> Event:
        """An event that nobody else holds.

        Args:
            make_current: makes the device's context this thread's, to create one.
        """
        try:
            return Event(self._free.pop(), self._free)
        except IndexError:
            make_current()
            handle = ctypes.c_void_p()
            driver().call("cuEventCreate", ctypes.byref(handle), _DISABLE_TIMING)
            assert handle.value is not None
            return Event(handle.value, self._free)
