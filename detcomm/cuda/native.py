# SPDX-License-Identifier: Apache-2.0
"""``native/cuda/detcomm_cuda.h`` in ctypes: structures, constants, the loaded library. Chooses nothing, keeps no state.

The library is its own, beside ``libdetcomm.so``, and is loaded when the first CUDA tensor comes. Calls release the GIL.
"""

import ctypes
import os
from functools import cache
from pathlib import Path

import detcomm
from detcomm.cuda.libraries import Library
from detcomm.errors import NativeError

ABI_VERSION = 3
FILE_NAME = "libdetcomm_cuda.so"
PATH_VARIABLE = "DETCOMM_NATIVE_CUDA_LIBRARY"
"""A file to take instead, whatever it was built from."""

MAX_COPIES = 64
MAX_PEERS = 16
MAX_PEER_OPERANDS = 128

FOLD, COPY, EXCHANGE, RECORD, WAIT, GATHER, SYNC, PEER_FOLD, PEER_COPY, PEER_FUSED = range(10)

FUNCTIONS = (
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclSend",
    "ncclRecv",
    "ncclAllGather",
    "cuLaunchKernel",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuCtxSetCurrent",
)
"""What ``dc_cuda_functions`` holds, in its order."""

_POINTER = ctypes.c_void_p


class Functions(ctypes.Structure):
    """``dc_cuda_functions``."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in FUNCTIONS)


class CRegion(ctypes.Structure):
    """``dc_cuda_region``."""

    _fields_ = (
        ("offset", ctypes.c_uint64),
        ("num_bytes", ctypes.c_uint64),
        ("buffer", ctypes.c_int32),
        ("peer", ctypes.c_int32),
        ("staged", ctypes.c_uint64),
    )


class CSignal(ctypes.Structure):
    """``dc_cuda_signal``."""

    _fields_ = (
        ("peer", ctypes.c_uint32),
        ("ready", ctypes.c_uint32),
        ("awaited", ctypes.c_uint32),
        ("done", ctypes.c_uint32),
        ("most", ctypes.c_int32),
        ("flags", ctypes.c_uint32),
    )


class CPeers(ctypes.Structure):
    """``dc_cuda_peers``."""

    _fields_ = (
        ("staging", _POINTER * MAX_PEERS),
        ("pads", _POINTER * MAX_PEERS),
        ("table", _POINTER),
        ("words", _POINTER),
        ("patience_ns", ctypes.c_uint64),
        ("places", ctypes.c_uint64 * 2),
        ("fused_offset", ctypes.c_uint64),
        ("slice_bytes", ctypes.c_uint64),
        ("pad_bytes", ctypes.c_uint64),
        ("index", ctypes.c_uint32),
        ("num_peers", ctypes.c_uint32),
    )


class COp(ctypes.Structure):
    """``dc_cuda_op``."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("stream", ctypes.c_int32),
        ("first_region", ctypes.c_uint32),
        ("num_regions", ctypes.c_uint32),
        ("num_sends", ctypes.c_uint32),
        ("num_blocks", ctypes.c_uint32),
        ("event", ctypes.c_uint32),
        ("num_rounds", ctypes.c_uint32),
        ("parts", ctypes.c_uint32 * 4),
        ("kernel", _POINTER),
        ("count", ctypes.c_uint64),
        ("divisor", ctypes.c_uint64),
    )


class CProgram(ctypes.Structure):
    """``dc_cuda_program``."""

    _fields_ = (
        ("ops", ctypes.POINTER(COp)),
        ("regions", ctypes.POINTER(CRegion)),
        ("signals", ctypes.POINTER(CSignal)),
        ("num_ops", ctypes.c_uint64),
        ("num_regions", ctypes.c_uint64),
    )


class CCall(ctypes.Structure):
    """``dc_cuda_call``."""

    _fields_ = (
        ("comm", _POINTER),
        ("streams", _POINTER * 2),
        ("events", _POINTER),
        ("buffers", _POINTER * 3),
        ("caller", _POINTER),
        ("begin", _POINTER),
        ("after", _POINTER),
        ("done", _POINTER),
        ("context", _POINTER),
        ("peers", _POINTER),
    )


class CFailure(ctypes.Structure):
    """``dc_cuda_failure``."""

    _fields_ = (
        ("function", ctypes.c_char_p),
        ("code", ctypes.c_int32),
        ("op", ctypes.c_uint64),
    )


@cache
def library() -> ctypes.CDLL:
    """The library, its functions ready to call.

    Raises:
        NativeError: it is not there, or of another version.
    """
    given = os.environ.get(PATH_VARIABLE)
    candidates = [Path(given)] if given else [Path(place) / FILE_NAME for place in detcomm.__path__]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        places = ", ".join(map(str, candidates))
        raise NativeError(
            f"CUDA tensors need {FILE_NAME}, which is not at {places}; it is built at install where there is a C++ "
            "compiler: reinstall detcomm with one"
        )
    try:
        loaded = ctypes.CDLL(str(path))
        loaded.dc_cuda_issue.restype = ctypes.c_int
        loaded.dc_cuda_issue.argtypes = (_POINTER, _POINTER, _POINTER, _POINTER)
        loaded.dc_cuda_abi_version.restype = ctypes.c_uint32
        loaded.dc_cuda_abi_version.argtypes = ()
    except (OSError, AttributeError) as error:
        raise NativeError(f"{path} cannot be loaded: {error}") from error
    version = loaded.dc_cuda_abi_version()
    if version != ABI_VERSION:
        raise NativeError(f"{path} has interface version {version}, expected {ABI_VERSION}; reinstall detcomm")
    return loaded


def functions_of(driver: Library, nccl: Library | None) -> Functions:
    """The table of functions; without NCCL for a program that exchanges nothing."""
    table = Functions()
    for name in FUNCTIONS:
        if name.startswith("cu"):
            setattr(table, name, driver.address(name))
        elif nccl is not None:
            setattr(table, name, nccl.address(name))
    return table
