# SPDX-License-Identifier: Apache-2.0
"""Words that the host and the kernels of a group both read and write while kernels run.

By them the host ends kernels that wait for a peer, and a kernel says which peer it has waited for in vain. The memory
is the host's, pinned and mapped, so that a word gets through while the device is busy.
"""

import ctypes
import threading

from detcomm.cuda.libraries import driver
from detcomm.cuda.peer_memory.device_access import DeviceAccess

NUM_WORDS = 64
_PORTABLE_AND_MAPPED = 1 | 2  # CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP


class HostWords:
    """64 words of 32 bits, zero at first. Kernels load and store them with ``.relaxed.sys``.

    Attributes:
        device: their address for kernels.
        host: the same words for the host.
    """

    ABORT = 0
    """Nonzero: kernels that wait are to return at once."""

    ERROR = 1
    """Nonzero: a kernel has given up."""

    def __init__(self, access: DeviceAccess) -> None:
        self._access = access
        self._lock = threading.Lock()
        address, device = ctypes.c_void_p(), ctypes.c_void_p()
        with access.current():
            driver().call("cuMemHostAlloc", ctypes.byref(address), 4 * NUM_WORDS, _PORTABLE_AND_MAPPED)
            driver().call("cuMemHostGetDevicePointer_v2", ctypes.byref(device), address, 0)
        assert address.value is not None
        assert device.value is not None
        self._address: int | None = address.value
        self.device: int = device.value
        self.host = (ctypes.c_uint32 * NUM_WORDS).from_address(address.value)
        ctypes.memset(self.host, 0, ctypes.sizeof(self.host))

    def abort(self) -> None:
        """Have kernels that wait return. From any thread."""
        with self._lock:
            if self._address is not None:
                self.host[self.ABORT] = 1

    def error(self) -> int:
        """What the first kernel that gave up has written; 0 if none has. From any thread."""
        return self.read(self.ERROR)

    def read(self, index: int) -> int:
        """A word as it is now; 0 after the end. From any thread, also one that polls while another one closes."""
        with self._lock:
            return 0 if self._address is None else self.host[index]

    def close(self) -> None:
        """Give the memory back; no kernel uses it any more. Idempotent."""
        with self._lock:  # the memory is gone afterwards, for the thread that polls too
            address, self._address = self._address, None
        if address is not None:
            with self._access.current():
                driver().call("cuMemFreeHost", address)
