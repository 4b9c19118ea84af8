# SPDX-License-Identifier: Apache-2.0
"""What kernels do whose operands may lie in peers' memory, on the host: as ``native/kernels/peers.cuh`` finds them."""

import ctypes
from typing import Any

from detcomm.cuda import native


class CSource(ctypes.Structure):
    """``Source`` of ``native/kernels/peers.cuh``."""

    _fields_ = (("address", ctypes.c_uint64), ("place", ctypes.c_uint64), ("offset", ctypes.c_uint64))

    def where(self) -> int:
        """What ``address_of`` says there."""
        base = ctypes.c_uint64.from_address(self.place).value if self.place else 0
        return base + self.offset if base else int(self.address)


class CPeerCopies(ctypes.Structure):
    """``Copies`` of ``native/kernels/copy.cu`` with ``DC_PEERS``."""

    _fields_ = (
        ("src", CSource * native.MAX_COPIES),
        ("dst", ctypes.c_uint64 * native.MAX_COPIES),
        ("num_bytes", ctypes.c_uint64 * native.MAX_COPIES),
    )


def copy(parameters: Any, num_copies: int) -> None:
    """All rows; backwards, since copies of one launch run in no order."""
    rows = ctypes.cast(parameters[0], ctypes.POINTER(CPeerCopies))[0]
    for k in reversed(range(num_copies)):
        ctypes.memmove(rows.dst[k], rows.src[k].where(), rows.num_bytes[k])


def fold(kernels: Any, kernel: int, parameters: Any) -> None:
    """A fold of ``fake_gpu.Kernels``."""
    sources = ctypes.cast(parameters[0], ctypes.POINTER(CSource))
    output, count, divisor = (ctypes.cast(parameters[k], ctypes.POINTER(ctypes.c_uint64))[0] for k in (1, 2, 3))
    operands = [sources[k].where() for k in range(len(kernels.specs[kernel].leaves))]
    kernels.run_fold(kernel, operands, output, count, divisor)
