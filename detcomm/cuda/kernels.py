# SPDX-License-Identifier: Apache-2.0
"""The fold, copy and premultiply kernels of one device: which source a specification needs, loaded when it is needed.

The numbers of blocks are speed only. Knows neither ranks nor plans.
"""

import ctypes
import threading
from typing import Any

from detcomm.collectives import DType, ReduceOp
from detcomm.cuda.compile import compile_kernel
from detcomm.cuda.libraries import driver
from detcomm.errors import UnsupportedError
from detcomm.fold_spec import FoldSpec

THREADS = 256
MAX_OPERANDS = 480
"""``DC_CUDA_MAX_OPERANDS``: what the parameters of a kernel have room for."""

_MOST_BLOCKS = (1 << 31) - 1
_COPY_BYTES_PER_BLOCK = 1 << 16
_MOST_COPY_BLOCKS = 64
_MOST_PEER_COPY_BLOCKS = 1 << 14

_PEER_COPY_BYTES_PER_BLOCK = THREADS * 16 * 4  # as many loads in flight as a thread of copy.cu has
PEERS = {"DC_PEERS": "1"}
"""The macro of a kernel whose operands may lie in peers' memory."""

_CODECS = {
    DType.FLOAT32: "Float32",
    DType.FLOAT64: "Float64",
    DType.BFLOAT16: "BFloat16",
    DType.FLOAT16: "Float16",
    DType.INT8: "Int8",
    DType.INT16: "Int16",
    DType.INT32: "Int32",
    DType.INT64: "Int64",
    DType.UINT8: "UInt8",
    DType.UINT16: "UInt16",
    DType.UINT32: "UInt32",
    DType.UINT64: "UInt64",
    DType.BOOL: "Bool",
}
_OPERATIONS = {
    ReduceOp.SUM: "Sum",
    ReduceOp.AVG: "Sum",
    ReduceOp.PREMUL_SUM: "Sum",  # its sender has multiplied
    ReduceOp.PRODUCT: "Product",
    ReduceOp.MIN: "Min",
    ReduceOp.MAX: "Max",
    ReduceOp.BAND: "And",
    ReduceOp.BOR: "Or",
    ReduceOp.BXOR: "Xor",
}
_ON_BOOL = {ReduceOp.SUM: "Or", ReduceOp.MAX: "Or", ReduceOp.PRODUCT: "And", ReduceOp.MIN: "And"}


def fold_defines(spec: FoldSpec) -> dict[str, str]:
    """The macros of ``native/kernels/fold.cu`` for one specification.

    Raises:
        UnsupportedError: more operands than a kernel takes.
    """
    if len(spec.leaves) > MAX_OPERANDS:
        raise UnsupportedError(
            f"a fold of {len(spec.leaves)} operands on a GPU; expected at most {MAX_OPERANDS}: choose a schedule of "
            "several stages, such as halving or hierarchical"
        )
    operation = _ON_BOOL.get(spec.op) if spec.dtype is DType.BOOL else None
    return {
        "DC_LEAF": _CODECS[spec.dtype],
        "DC_PARTIAL": _CODECS[spec.partial],
        "DC_OUTPUT": _CODECS[spec.output_dtype],
        "DC_OP": operation or _OPERATIONS[spec.op],
        "DC_ROUND": str(int(spec.accumulate == "wire")),
        "DC_TREE": str(int(spec.shape == "tree")),
        "DC_DIVIDE": str(int(spec.divides)),
        "DC_NUM_INPUTS": str(len(spec.leaves)),
        "DC_LEAVES": ",".join(str(int(leaf)) for leaf in spec.leaves),
    }


def copy_blocks(num_bytes: int) -> int:
    """Blocks of each row of a copy whose longest row has this many bytes."""
    return max(1, min(-(-num_bytes // _COPY_BYTES_PER_BLOCK), _MOST_COPY_BLOCKS))


def peer_copy_blocks(num_bytes: int) -> int:
    """The same where a few long rows are all there is: enough blocks to fill the memory's bandwidth."""
    return max(1, min(-(-num_bytes // _PEER_COPY_BYTES_PER_BLOCK), _MOST_PEER_COPY_BLOCKS))


class Kernels:
    """What is loaded on one device.

    Args:
        device: its number in this process.

    Attributes:
        bus: where it sits in its host; equal for processes that share it.
        num_processors: its streaming multiprocessors.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        context = ctypes.c_void_p()
        handle = ctypes.c_int()
        driver().call("cuDeviceGet", ctypes.byref(handle), device)
        driver().call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle.value)
        self.context: int | None = context.value
        major, minor, self.num_processors = (self._attribute(handle.value, number) for number in (75, 76, 16))
        self.architecture = f"sm_{major}{minor}"
        self.bus = "-".join(str(self._attribute(handle.value, number)) for number in (50, 33, 34))
        self._loaded: dict[tuple[str, ...], int] = {}
        self._lock = threading.Lock()

    def fold(self, spec: FoldSpec) -> int:
        """The kernel of a specification, ready to launch."""
        return self._kernel("fold.cu", "dc_fold", fold_defines(spec))

    def copy(self) -> int:
        """The kernel of up to 64 copies."""
        return self._kernel("copy.cu", "dc_copy", {})

    def peer_fold(self, spec: FoldSpec) -> int:
        """The same for operands that may lie in peers' memory."""
        return self._kernel("fold.cu", "dc_fold", fold_defines(spec) | PEERS)

    def peer_copy(self) -> int:
        """As ``copy``, for sources that may lie in peers' memory."""
        return self._kernel("copy.cu", "dc_copy", PEERS)

    def sync(self) -> int:
        """The kernel that tells peers and waits for them."""
        return self._kernel("peer_sync.cu", "dc_peer_sync", {})

    def fused(self, spec: FoldSpec | None) -> int:
        """The kernel of a whole short call and its fold; ``None`` for a rank that folds nothing."""
        return self._kernel("peer_fused.cu", "dc_peer_fused", {} if spec is None else fold_defines(spec))

    def premultiply(self, dtype: DType) -> int:
        """The kernel of a sender of PREMUL_SUM."""
        return self._kernel("premultiply.cu", "dc_premultiply", {"DC_LEAF": _CODECS[dtype]})

    def fold_blocks(self, count: int, item_bytes: int) -> int:
        """Blocks for a fold of ``count`` elements whose leaves have ``item_bytes``: a thread for 16 bytes of a leaf.

        A fold has no work to share between them, and many short blocks keep memory busier than a few that loop.
        """
        num_vectors = -(-count * item_bytes // 16)
        return max(1, min(-(-num_vectors // THREADS), _MOST_BLOCKS))

    def launch(self, kernel: int, num_blocks: int, stream: int, *parameters: Any) -> None:
        """Launch a kernel by itself, outside a program.

        Args:
            parameters: ctypes values.
        """
        addresses = (ctypes.c_void_p * len(parameters))(*[ctypes.addressof(value) for value in parameters])
        self.make_current()
        driver().call("cuLaunchKernel", kernel, num_blocks, 1, 1, THREADS, 1, 1, 0, stream, addresses, None)

    def make_current(self) -> None:
        """Make the device's context this thread's, as the driver's functions need it."""
        driver().call("cuCtxSetCurrent", self.context)

    def _kernel(self, file: str, name: str, defines: dict[str, str]) -> int:
        key = (file, *defines.values())
        loaded = self._loaded.get(key)
        if loaded is not None:
            return loaded
        with self._lock:
            if key not in self._loaded:
                self._loaded[key] = self._load(compile_kernel(file, defines, self.architecture), name)
            return self._loaded[key]

    def _load(self, cubin: bytes, name: str) -> int:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.make_current()
        driver().call("cuModuleLoadData", ctypes.byref(module), cubin)
        driver().call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        assert function.value is not None
        return function.value

    def _attribute(self, handle: int, number: int) -> int:
        value = ctypes.c_int()
        driver().call("cuDeviceGetAttribute", ctypes.byref(value), number, handle)
        return value.value
