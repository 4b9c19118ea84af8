# SPDX-License-Identifier: Apache-2.0
"""``native/include/detcomm.h`` in ctypes: where the library is, whether it may be used, and its folds.

Knows neither ranks nor plans. Calls release the GIL. Two environment variables, read when the library is first needed:

    DETCOMM_NATIVE=0              do without it
    DETCOMM_NATIVE_LIBRARY=path   take this file, whatever sources it was built from
"""

import ctypes
import hashlib
import os
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import detcomm
from detcomm.collectives import DType, ReduceOp
from detcomm.errors import NativeError, ScheduleError
from detcomm.fold_spec import FoldSpec
from detcomm.transports.base import Bytes

ABI_VERSION = 2
FILE_NAME = "libdetcomm.so"

DTYPES = {
    DType.FLOAT32: 0,
    DType.FLOAT64: 1,
    DType.BFLOAT16: 2,
    DType.FLOAT16: 3,
    DType.INT8: 4,
    DType.INT16: 5,
    DType.INT32: 6,
    DType.INT64: 7,
    DType.UINT8: 8,
    DType.UINT16: 9,
    DType.UINT32: 10,
    DType.UINT64: 11,
    DType.BOOL: 12,
}
OPS = {
    ReduceOp.SUM: 0,
    ReduceOp.AVG: 1,
    ReduceOp.PRODUCT: 2,
    ReduceOp.MIN: 3,
    ReduceOp.MAX: 4,
    ReduceOp.BAND: 5,
    ReduceOp.BOR: 6,
    ReduceOp.BXOR: 7,
    ReduceOp.PREMUL_SUM: 0,  # its sender has multiplied
}
ACCUMULATE = {"float32": 0, "wire": 1}
SHAPES = {"tree": 0, "linear": 1}

_OK = 0


class CFoldSpec(ctypes.Structure):
    """``dc_fold_spec``."""

    _fields_ = (
        ("op", ctypes.c_int),
        ("dtype", ctypes.c_int),
        ("accumulate", ctypes.c_int),
        ("shape", ctypes.c_int),
        ("is_final", ctypes.c_int32),
        ("num_inputs", ctypes.c_uint32),
        ("divisor", ctypes.c_uint64),
        ("leaves", ctypes.POINTER(ctypes.c_uint8)),
    )


_POINTER = ctypes.c_void_p
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "dc_fold": (ctypes.c_int, (_POINTER, _POINTER, _POINTER, ctypes.c_size_t)),
    "dc_premultiply": (ctypes.c_int, (ctypes.c_int, ctypes.c_double, _POINTER, _POINTER, ctypes.c_size_t)),
    "dc_fold_variants": (ctypes.c_char_p, ()),
    "dc_select_fold_variant": (ctypes.c_int, (ctypes.c_char_p,)),
    "dc_last_error": (ctypes.c_char_p, ()),
    "dc_abi_version": (ctypes.c_uint32, ()),
    "dc_source_hash": (ctypes.c_char_p, ()),
}
"""Result and argument types by function; a test compares them with the header."""


def library() -> ctypes.CDLL | None:
    """The loaded library, or ``None`` where there is none to use; ``why_not`` says why."""
    return _search()[0]


def available() -> bool:
    """Whether folds run in native code."""
    return library() is not None


def why_not() -> str:
    """Why there is no native library to use; empty where there is one."""
    return _search()[1]


def disabled() -> bool:
    """Whether the environment asks to do without the library."""
    return os.environ.get("DETCOMM_NATIVE", "1") == "0"


@cache
def _search() -> tuple[ctypes.CDLL | None, str]:
    if disabled():
        return None, "DETCOMM_NATIVE=0 is set"
    given = os.environ.get("DETCOMM_NATIVE_LIBRARY")
    candidates = [Path(given)] if given else [Path(place) / FILE_NAME for place in detcomm.__path__]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        places = ", ".join(str(path) for path in candidates)
        return None, f"no file at {places}; it is built at install where there is a C++ compiler"
    try:
        loaded = _load(path)
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be loaded: {error}"
    version = loaded.dc_abi_version()
    if version != ABI_VERSION:
        return None, f"{path} has interface version {version}, expected {ABI_VERSION}; reinstall detcomm"
    built_from, sources = loaded.dc_source_hash().decode(), None if given else source_hash()
    if sources is not None and built_from != sources:
        return None, f"{path} was built from other sources than those beside this package; reinstall detcomm"
    return loaded, ""


def _load(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = arguments
    return loaded


def source_hash(root: Path | None = None) -> str | None:
    """What ``native/CMakeLists.txt`` embeds, over the sources at ``root``; ``None`` if there are none.

    Args:
        root: the directory ``native``; default: the one beside an editable package.
    """
    root = Path(__file__).parent.parent / "native" if root is None else root
    if not (root / "CMakeLists.txt").is_file():
        return None
    files = [*root.glob("src/*.cpp"), *root.glob("src/*.h"), *root.glob("include/*.h")]
    names = sorted([str(file.relative_to(root)) for file in files] + ["CMakeLists.txt", "exports.map"])
    lines = [f"{name}\n{hashlib.sha256((root / name).read_bytes()).hexdigest()}\n" for name in names]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def variants() -> tuple[str, ...]:
    """The instruction sets that can be chosen here, best first."""
    names: bytes = _required().dc_fold_variants()
    return tuple(names.decode().split())


def select_variant(name: str) -> None:
    """Run all later folds of this process with one of ``variants()``. Speed only; for tests and measurements.

    Raises:
        NativeError: there is no such variant, naming those that there are.
    """
    loaded = _required()
    if loaded.dc_select_fold_variant(name.encode()) != _OK:
        raise NativeError(_last_error(loaded))


def native_fold(spec: FoldSpec, inputs: Sequence[Bytes], output: Bytes) -> None:
    """As ``fold.fold``; the sizes have been checked.

    Raises:
        ScheduleError: ``output`` overlaps an operand without being its memory.
    """
    structure, pointers, output_item = _c_spec(spec)
    addresses = pointers(*[_address(data) for data in inputs])
    loaded = _required()
    status = loaded.dc_fold(structure, addresses, _address(output), len(output) // output_item)
    if status != _OK:
        raise ScheduleError(_last_error(loaded))


def native_premultiply(dtype: DType, factor: float, input: Bytes, output: Bytes) -> None:
    """As ``fold.premultiply``; the sizes have been checked.

    Raises:
        ScheduleError: ``output`` overlaps ``input`` without being its memory.
    """
    count = len(output) // dtype.itemsize
    loaded = _required()
    status = loaded.dc_premultiply(DTYPES[dtype], factor, _address(input), _address(output), count)
    if status != _OK:
        raise ScheduleError(_last_error(loaded))


def _address(data: Bytes) -> int:
    """Where the bytes begin; there is at least one."""
    if data.flags.writeable:
        return ctypes.addressof(ctypes.c_char.from_buffer(data))  # type: ignore[arg-type]  # a third of the time of `data.ctypes.data`
    return data.ctypes.data


@lru_cache(maxsize=1024)
def _c_spec(spec: FoldSpec) -> tuple[Any, type[ctypes.Array[ctypes.c_void_p]], int]:
    """The structure of a specification, the type of the array of its operands' addresses, an output element's size."""
    num_inputs = len(spec.leaves)
    leaves = (ctypes.c_uint8 * num_inputs)(*spec.leaves)  # the structure keeps it alive
    structure = CFoldSpec(
        OPS[spec.op],
        DTYPES[spec.dtype],
        ACCUMULATE[spec.accumulate],
        SHAPES[spec.shape],
        spec.final,
        num_inputs,
        spec.divisor,
        leaves,
    )
    return ctypes.pointer(structure), ctypes.c_void_p * num_inputs, spec.output_dtype.itemsize


def _required() -> ctypes.CDLL:
    loaded = library()
    if loaded is None:
        raise NativeError(f"the native library is not available: {why_not()}")
    return loaded


def _last_error(loaded: ctypes.CDLL) -> str:
    text: bytes = loaded.dc_last_error()
    return text.decode(errors="replace")
