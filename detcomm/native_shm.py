# SPDX-License-Identifier: Apache-2.0
"""``native/include/detcomm_shm.h`` in ctypes: structures, constants, signatures. Chooses nothing, keeps no state.

Calls release the GIL. The library is the one that ``detcomm.native`` has loaded.
"""

import ctypes
from functools import cache

from detcomm.errors import NativeError
from detcomm.native import library, why_not

MAX_RANKS = 512
DIGEST_BYTES = 32
TEXT_BYTES = 2048

OK = 0
MISMATCH = 1
PEER_LOST = 2
TIMEOUT = 3
ABORTED = 4
USAGE = 5


class Fault(ctypes.Structure):
    """``dc_shm_fault``: what broke a group."""

    _fields_ = (
        ("status", ctypes.c_int32),
        ("reporter", ctypes.c_int32),
        ("num_culprits", ctypes.c_int32),
        ("culprits", ctypes.c_int32 * MAX_RANKS),
        ("text", ctypes.c_char * TEXT_BYTES),
    )


class Tuning(ctypes.Structure):
    """``dc_shm_tuning``: sizes of the staging buffers, and how long a wait goes on before it sleeps."""

    _fields_ = (
        ("chunk_bytes", ctypes.c_uint64),
        ("oneshot_bytes", ctypes.c_uint64),
        ("mailbox_bytes", ctypes.c_uint64),
        ("spin_ns", ctypes.c_int64),
        ("yield_ns", ctypes.c_int64),
        ("slice_ns", ctypes.c_int64),
    )


class NativeCall(ctypes.Structure):
    """``dc_shm_call``: one collective."""

    _fields_ = (
        ("digest", ctypes.c_uint8 * DIGEST_BYTES),
        ("collective", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("op", ctypes.c_int32),
        ("accumulate", ctypes.c_int32),
        ("shape", ctypes.c_int32),
        ("premultiply", ctypes.c_int32),
        ("root", ctypes.c_int32),
        ("item_bytes", ctypes.c_int32),
        ("ring_chunk_elems", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("shards", ctypes.POINTER(ctypes.c_uint64)),
    )


class NativeParcel(ctypes.Structure):
    """``dc_shm_parcel``: bytes to or from a peer."""

    _fields_ = (
        ("peer", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("num_bytes", ctypes.c_uint64),
    )


_POINTER = ctypes.c_void_p
SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "dc_shm_segment_bytes": (ctypes.c_uint64, (ctypes.c_int32, _POINTER)),
    "dc_shm_open": (_POINTER, (ctypes.c_int32, ctypes.c_int32, *(_POINTER,) * 5)),
    "dc_shm_close": (None, (_POINTER,)),
    "dc_shm_run": (ctypes.c_int32, (_POINTER, _POINTER, _POINTER, _POINTER, ctypes.c_double, ctypes.c_double)),
    "dc_shm_agree": (ctypes.c_int32, (_POINTER, ctypes.c_char_p, ctypes.c_double)),
    "dc_shm_gather_texts": (ctypes.c_int32, (_POINTER, ctypes.c_char_p, _POINTER, ctypes.c_double)),
    "dc_shm_exchange": (
        ctypes.c_int32,
        (_POINTER, _POINTER, ctypes.c_int32, _POINTER, ctypes.c_int32, ctypes.c_double),
    ),
    "dc_shm_abort": (None, (_POINTER, ctypes.c_char_p)),
    "dc_shm_get_fault": (None, (_POINTER, _POINTER)),
}
"""Result and argument types by function; a test compares them with the header."""


@cache
def functions() -> ctypes.CDLL:
    """The native library, its shared-memory functions ready to call.

    Raises:
        NativeError: there is no native library here, with the reason.
    """
    loaded = library()
    if loaded is None:
        raise NativeError(f"shared memory needs the native library, which is not available: {why_not()}")
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = arguments
    return loaded
