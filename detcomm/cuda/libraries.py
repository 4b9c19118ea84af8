# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver, NCCL and NVRTC of this process, through ctypes: found, checked, and their failures made errors.

All three are the ones that torch brings or has loaded, so that no other CUDA package is needed and no second NCCL can
come in. Knows neither ranks nor tensors.
"""

import ctypes
import glob
import os
import sys
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

from detcomm.errors import NativeError

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int
_UINT = ctypes.c_uint
_SIZE = ctypes.c_size_t


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``; passed by value."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


class IpcHandle(ctypes.Structure):
    """``CUipcMemHandle``: names an allocation to other processes; passed by value."""

    _fields_ = (("reserved", ctypes.c_byte * 64),)


DRIVER_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_UINT,),
    "cuDeviceGet": (_POINTER, _INT),
    "cuDeviceGetAttribute": (_POINTER, _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_POINTER, _INT),
    "cuCtxSetCurrent": (_POINTER,),
    "cuModuleLoadData": (_POINTER, ctypes.c_char_p),
    "cuModuleGetFunction": (_POINTER, _POINTER, ctypes.c_char_p),
    "cuLaunchKernel": (_POINTER, *[_UINT] * 7, _POINTER, _POINTER, _POINTER),
    "cuEventCreate": (_POINTER, _UINT),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuEventQuery": (_POINTER,),
    "cuEventDestroy_v2": (_POINTER,),
    "cuStreamWaitEvent": (_POINTER, _POINTER, _UINT),
    "cuStreamSynchronize": (_POINTER,),
    "cuStreamCreate": (_POINTER, _UINT),
    "cuStreamDestroy_v2": (_POINTER,),
    "cuMemcpyDtoDAsync_v2": (_POINTER, _POINTER, _SIZE, _POINTER),
    "cuMemcpyDtoHAsync_v2": (_POINTER, _POINTER, _SIZE, _POINTER),
    "cuMemcpyHtoDAsync_v2": (_POINTER, _POINTER, _SIZE, _POINTER),
    "cuMemsetD8Async": (_POINTER, ctypes.c_ubyte, _SIZE, _POINTER),
    "cuMemAlloc_v2": (_POINTER, _SIZE),
    "cuMemFree_v2": (_POINTER,),
    "cuMemGetAddressRange_v2": (_POINTER, _POINTER, _POINTER),
    "cuMemHostAlloc": (_POINTER, _SIZE, _UINT),
    "cuMemHostGetDevicePointer_v2": (_POINTER, _POINTER, _UINT),
    "cuMemFreeHost": (_POINTER,),
    "cuIpcGetMemHandle": (_POINTER, _POINTER),
    "cuIpcOpenMemHandle_v2": (_POINTER, IpcHandle, _UINT),
    "cuIpcCloseMemHandle": (_POINTER,),
    "cuMemRetainAllocationHandle": (_POINTER, _POINTER),
    "cuMemExportToShareableHandle": (_POINTER, ctypes.c_uint64, _INT, ctypes.c_uint64),
    "cuMemImportFromShareableHandle": (_POINTER, _POINTER, _INT),
    "cuMemRelease": (ctypes.c_uint64,),
    "cuMemAddressReserve": (_POINTER, _SIZE, _SIZE, _POINTER, ctypes.c_uint64),
    "cuMemAddressFree": (_POINTER, _SIZE),
    "cuMemMap": (_POINTER, _SIZE, _SIZE, ctypes.c_uint64, ctypes.c_uint64),
    "cuMemUnmap": (_POINTER, _SIZE),
    "cuMemSetAccess": (_POINTER, _SIZE, _POINTER, _SIZE),
    "cuThreadExchangeStreamCaptureMode": (_POINTER,),
    "cuStreamGetCaptureInfo_v2": (_POINTER,) * 6,
    "cuGetErrorName": (_INT, _POINTER),
}
NCCL_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (_POINTER,),
    "ncclGetUniqueId": (_POINTER,),
    "ncclCommInitRank": (_POINTER, _INT, UniqueId, _INT),
    "ncclCommGetAsyncError": (_POINTER, _POINTER),
    "ncclCommAbort": (_POINTER,),
    "ncclCommDestroy": (_POINTER,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclSend": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclRecv": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclAllGather": (_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER),
}
NVRTC_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "nvrtcVersion": (_POINTER, _POINTER),
    "nvrtcCreateProgram": (_POINTER, ctypes.c_char_p, ctypes.c_char_p, _INT, _POINTER, _POINTER),
    "nvrtcCompileProgram": (_POINTER, _INT, _POINTER),
    "nvrtcDestroyProgram": (_POINTER,),
    "nvrtcGetCUBINSize": (_POINTER, _POINTER),
    "nvrtcGetCUBIN": (_POINTER, _POINTER),
    "nvrtcGetPTXSize": (_POINTER, _POINTER),
    "nvrtcGetPTX": (_POINTER, _POINTER),
    "nvrtcGetProgramLogSize": (_POINTER, _POINTER),
    "nvrtcGetProgramLog": (_POINTER, _POINTER),
}


_NCCL_ERRORS = {
    1: "ncclUnhandledCudaError",
    2: "ncclSystemError",
    3: "ncclInternalError",
    4: "ncclInvalidArgument",
    5: "ncclInvalidUsage",
    6: "ncclRemoteError",
}
"""``ncclResult_t``. The last two tell of a peer that calls something else, or is gone."""


class Library:
    """Functions of one library. Called through ``call``, a nonzero result is an error.

    Args:
        name: for error texts.
        loaded: the library.
        signatures: argument types by function; all return an ``int``.
    """

    def __init__(self, name: str, loaded: Any, signatures: dict[str, tuple[Any, ...]]) -> None:
        self.name = name
        self._functions: dict[str, Any] = {}
        for function_name, arguments in signatures.items():
            function = getattr(loaded, function_name)
            function.argtypes = arguments
            function.restype = _INT
            self._functions[function_name] = function

    def __getitem__(self, name: str) -> Any:
        """The function itself, for those whose result is an answer."""
        return self._functions[name]

    def address(self, name: str) -> int | None:
        """Where a function lies, for native code that calls it."""
        return ctypes.cast(self._functions[name], ctypes.c_void_p).value

    def call(self, name: str, *args: Any) -> None:
        """Call a function.

        Raises:
            NativeError: it did not return 0; names function and code.
        """
        code = self._functions[name](*args)
        if code:
            raise NativeError(f"{self.name}: {name} failed: {self.describe(code)}")

    def describe(self, code: int) -> str:
        """An error code in words."""
        name = ctypes.c_char_p()
        if "cuGetErrorName" in self._functions:
            self._functions["cuGetErrorName"](code, ctypes.byref(name))
        text = name.value.decode() if name.value else _NCCL_ERRORS.get(code) if self.name == "NCCL" else None
        return f"error {code}{f' ({text})' if text else ''}"


@cache
def driver() -> Library:
    """The CUDA driver.

    Raises:
        NativeError: there is none.
    """
    try:
        library = Library("CUDA driver", ctypes.CDLL("libcuda.so.1"), DRIVER_SIGNATURES)
    except (OSError, AttributeError) as error:
        raise NativeError(f"no CUDA driver: {error}") from error
    library.call("cuInit", 0)
    return library


@cache
def nccl() -> Library:
    """The NCCL that torch has loaded.

    Raises:
        NativeError: none is loaded, or two are: their symbols would be mixed.
    """
    paths = sorted({os.path.realpath(path) for path in _mapped("libnccl.so")})
    if not paths:
        raise NativeError("no libnccl.so is loaded in this process; detcomm needs a torch that links NCCL dynamically")
    if len(paths) > 1:
        raise NativeError(f"two NCCL libraries are loaded: {' and '.join(paths)}; uninstall one of them")
    return Library("NCCL", ctypes.CDLL(paths[0]), NCCL_SIGNATURES)


def nccl_version() -> int:
    """As NCCL counts: 22809 is 2.28.9."""
    version = ctypes.c_int()
    nccl().call("ncclGetVersion", ctypes.byref(version))
    return version.value


@cache
def nvrtc() -> Library:
    """CUDA's runtime compiler: the one loaded, else the one among torch's packages, else the system's.

    Raises:
        NativeError: there is none; says what to install.
    """
    reasons = []
    for path in _nvrtc_candidates():
        try:
            folder = os.path.dirname(path)
            for builtins in glob.glob(f"{folder}/libnvrtc-builtins.so.*") if folder else ():
                ctypes.CDLL(builtins)  # NVRTC opens it by its bare name
            return Library("NVRTC", ctypes.CDLL(path), NVRTC_SIGNATURES)
        except (OSError, AttributeError) as error:
            reasons.append(f"{path}: {error}")
    raise NativeError(
        "detcomm compiles its GPU kernels with NVRTC, and there is none: install nvidia-cuda-nvrtc (CUDA 13) or "
        f"nvidia-cuda-nvrtc-cu12 for the CUDA version of your torch. Tried {'; '.join(reasons)}"
    )


def _nvrtc_candidates() -> Iterable[str]:
    yield from sorted(_mapped("libnvrtc.so"))
    for folder in sys.path:
        for pattern in ("nvidia/cu*/lib/libnvrtc.so.*", "nvidia/cuda_nvrtc/lib/libnvrtc.so.*"):
            yield from sorted(glob.glob(os.path.join(folder, pattern)), reverse=True)
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    yield from (str(path) for path in Path(home, "lib64").glob("libnvrtc.so"))
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def _mapped(prefix: str) -> set[str]:
    """Files in this process's memory whose names begin so."""
    with open("/proc/self/maps") as lines:
        paths = {line.split(maxsplit=5)[5].strip() for line in lines if "/" in line}
    return {path for path in paths if os.path.basename(path).startswith(prefix)}


def relaxed_capture() -> Any:
    """Let this thread ask for the state of events while another thread captures a graph."""
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    driver().call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    return partial(driver().call, "cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def capture_id(stream: int) -> int:
    """Which capture of a graph a stream is part of; each has a number of its own in this process. 0: none."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    driver().call("cuStreamGetCaptureInfo_v2", stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    return number.value if status.value == 1 else 0  # CU_STREAM_CAPTURE_STATUS_ACTIVE
