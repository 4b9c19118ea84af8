# SPDX-License-Identifier: Apache-2.0
"""The kernels by themselves on one GPU, in memory that is exactly as long as it must be; for compute-sanitizer.

    compute-sanitizer --tool memcheck python -m tests.gpu.kernels

Without torch's allocator, whose large blocks would hide an access beyond a tensor.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from detcomm.collectives import DType, ReduceOp
from detcomm.cuda.kernels import Kernels, copy_blocks
from detcomm.cuda.native import MAX_COPIES
from detcomm.fold_spec import FoldSpec
from tests import inputs, oracle

COUNTS = (1, 7, 1000, 70_001)


class DeviceBytes:
    """Memory of the device, ``offset`` bytes behind an aligned address, and not one byte more."""

    def __init__(self, cuda: Any, content: Any, offset: int) -> None:
        self._cuda = cuda
        self._content = np.ascontiguousarray(content)
        base = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(base), ctypes.c_size_t(offset + content.nbytes))
        self._base = base
        self.start = base.value + offset
        self._call("cuMemcpyHtoD_v2", *self._both(self.start, self._content))

    def read(self) -> Any:
        """What is there now; the memory is gone afterwards."""
        self._call("cuCtxSynchronize")
        host = np.empty_like(self._content)
        there, here, size = self._both(self.start, host)
        self._call("cuMemcpyDtoH_v2", here, there, size)
        self._call("cuMemFree_v2", self._base)
        return host

    def _both(self, start: int, host: Any) -> tuple[Any, Any, Any]:
        return ctypes.c_uint64(start), ctypes.c_void_p(host.ctypes.data), ctypes.c_size_t(host.nbytes)

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._cuda, name)(*args)
        assert code == 0, f"{name}: error {code}"


def specs() -> Iterator[tuple[str, str, int, Any]]:
    """Every type, operation and way through the fold kernel, each at least once."""
    for dtype in inputs.DTYPES:
        if not dtype.startswith("complex"):
            for op in inputs.legal_ops(dtype):
                if op != "premul_sum":
                    yield dtype, op, 3, "float32"
    for dtype in ("bfloat16", "float16", "float32"):
        for num_inputs in (2, 8, 16, 17, 33):
            yield dtype, "sum", num_inputs, "float32"
            yield dtype, "avg", num_inputs, "wire"


def check() -> str:
    """Folds and copies of all alignments, compared with the oracle."""
    cuda = ctypes.CDLL("libcuda.so.1")
    kernels = Kernels(0)
    kernels.make_current()
    num_folds = 0
    for dtype, op, num_inputs, accumulate in specs():
        spec = FoldSpec(ReduceOp(op), DType(dtype), accumulate, "tree", (True,) * num_inputs, True, num_inputs)
        item = DType(dtype).itemsize
        for count in COUNTS:
            given = inputs.make(dtype, count, num_inputs)
            right = inputs.bits(oracle.reduce(given, dtype, op, accumulate=accumulate))
            for offset in (0, item):
                operands = [DeviceBytes(cuda, inputs.bits(array), offset) for array in given]
                output = DeviceBytes(cuda, np.full(count * item, 0x5A, np.uint8), offset)
                _fold(kernels, spec, count, operands, output)
                assert np.array_equal(output.read(), right), (dtype, op, num_inputs, accumulate, count, offset)
                for operand in operands:
                    operand.read()
                num_folds += 1
    return f"{num_folds} folds and {_copies(cuda, kernels)} copies have the right bits"


def _fold(kernels: Kernels, spec: FoldSpec, count: int, operands: list[DeviceBytes], output: DeviceBytes) -> None:
    kernels.launch(
        kernels.fold(spec),
        kernels.fold_blocks(count, spec.dtype.itemsize),
        0,
        (ctypes.c_uint64 * len(operands))(*[operand.start for operand in operands]),
        ctypes.c_uint64(output.start),
        ctypes.c_uint64(count),
        ctypes.c_uint64(spec.divisor),
    )


def _copies(cuda: Any, kernels: Kernels) -> int:
    rng = np.random.default_rng(2)
    num_copies = 0
    for num_bytes in (1, 15, 16, 1000, 200_003):
        for from_offset in (0, 1, 2, 4, 7):
            content = rng.integers(0, 256, num_bytes, np.uint8)
            source = DeviceBytes(cuda, content, from_offset)
            target = DeviceBytes(cuda, np.zeros_like(content), (3 * from_offset + num_bytes) % 16)
            copies = (ctypes.c_uint64 * (3 * MAX_COPIES))()
            copies[0], copies[MAX_COPIES], copies[2 * MAX_COPIES] = source.start, target.start, num_bytes
            kernels.launch(kernels.copy(), copy_blocks(num_bytes), 0, copies)
            assert np.array_equal(target.read(), content), (num_bytes, from_offset)
            source.read()
            num_copies += 1
    return num_copies


if __name__ == "__main__":
    print(check())
