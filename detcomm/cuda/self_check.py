# SPDX-License-Identifier: Apache-2.0
"""Golden vectors on a GPU, once a device and process: a driver or a compiler that gives other bits is found here.

The vectors hold subnormals, NaNs, zeros of both signs and overflow. Knows kernels, neither groups nor plans.
"""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from detcomm import golden_vectors
from detcomm.collectives import DType, ReduceOp
from detcomm.cuda.kernels import Kernels
from detcomm.errors import NativeError
from detcomm.fold_spec import FoldSpec
from detcomm.golden_vectors import GoldenCase

NUMERICS_ID = "tree/1:float32"
DTYPES = (DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16, DType.FLOAT16)
OPS = (ReduceOp.AVG, ReduceOp.MAX)
"""Each kernel is compiled once and kept on disk; few of them show what a device does to numbers."""


def check_device(kernels: Kernels, upload: Callable[[Any], Any], download: Callable[[Any], Any], stream: int) -> int:
    """Fold the golden vectors of the largest world on this device.

    Args:
        upload: puts an array of bytes on the device; what it returns has ``data_ptr``.
        download: brings it back, after ``stream`` has come so far.

    Returns:
        How many cases were compared.

    Raises:
        NativeError: other bits than they must be; names the case.
    """
    num_cases = 0
    for case in _cases():
        num_cases += 1
        spec = FoldSpec(
            case.op, case.dtype, case.accumulate, case.association.shape, (True,) * case.world_size, True,
            case.world_size,
        )  # fmt: skip
        inputs = [upload(np.array(data)) for data in case.inputs]
        output = upload(np.zeros_like(case.expected))
        count = case.expected.size // case.dtype.itemsize
        operands = (ctypes.c_uint64 * case.world_size)(*[data.data_ptr() for data in inputs])
        kernels.launch(
            kernels.fold(spec),
            kernels.fold_blocks(count, case.dtype.itemsize),
            stream,
            operands,
            ctypes.c_uint64(output.data_ptr()),
            ctypes.c_uint64(count),
            ctypes.c_uint64(case.world_size),
        )
        if not np.array_equal(download(output), case.expected):
            raise NativeError(f"the GPU (device {kernels.device}) gives other bits than docs/numerics.md for {case}")
    return num_cases


def _cases() -> Iterator[GoldenCase]:
    found = [case for case in golden_vectors.cases(NUMERICS_ID) if case.dtype in DTYPES and case.op in OPS]
    largest = max(case.world_size for case in found)
    return (case for case in found if case.world_size == largest)
