# SPDX-License-Identifier: Apache-2.0
"""What a rank brings into a call that cannot use it as it lies: a copy, or what the sender of a PREMUL_SUM makes."""

import ctypes

from detcomm.cuda.kernels import Kernels
from detcomm.cuda.libraries import driver
from detcomm.memory import DeviceMemory
from detcomm.request import Request


def contribute(kernels: Kernels, request: Request, src: DeviceMemory, dst: DeviceMemory, stream: int) -> None:
    """Put this rank's contribution to ``dst``.

    Args:
        kernels: of the device, whose context is this thread's.
        src: the caller's memory; may be ``dst`` itself.
    """
    if request.factor is None:
        if src.start != dst.start:
            driver().call("cuMemcpyDtoDAsync_v2", dst.start, src.start, src.size, stream)
        return
    dtype = request.call.dtype
    count = src.size // dtype.itemsize
    kernels.launch(
        kernels.premultiply(dtype),
        kernels.fold_blocks(count, dtype.itemsize),
        stream,
        ctypes.c_uint64(src.start),
        ctypes.c_uint64(dst.start),
        ctypes.c_uint64(count),
        ctypes.c_double(request.factor),
    )
