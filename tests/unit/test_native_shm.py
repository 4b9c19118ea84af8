# SPDX-License-Identifier: Apache-2.0
"""The ctypes view of shared memory agrees with its header: functions, structures, constants."""

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest

from detcomm import native_shm

HEADER = Path(__file__).parents[2] / "native" / "include" / "detcomm_shm.h"

pytestmark = pytest.mark.skipif(not HEADER.is_file(), reason="the native sources are not beside the tests")

SCALARS: dict[str, Any] = {
    "double": ctypes.c_double,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint8_t": ctypes.c_uint8,
    "uint64_t": ctypes.c_uint64,
    "char": ctypes.c_char,
    "void": None,
}
STRUCTURES = {
    "dc_shm_fault": native_shm.Fault,
    "dc_shm_tuning": native_shm.Tuning,
    "dc_shm_call": native_shm.NativeCall,
    "dc_shm_parcel": native_shm.NativeParcel,
}


def _code() -> str:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    for name, value in re.findall(r"#define (DC_SHM_\w+) (\d+)", text):
        text = re.sub(rf"\b{name}\b", value, text)
    return re.sub(r"^#.*$", "", text, flags=re.MULTILINE)


def _is_text(type_text: str) -> bool:
    """Bytes that Python hands over as ``bytes``; all other pointers are plain addresses."""
    return type_text.replace(" ", "") in ("constchar*", "constuint8_t*")


def _kind(type_text: str) -> Any:
    if _is_text(type_text):
        return ctypes.c_char_p
    return ctypes.c_void_p if "*" in type_text else SCALARS[type_text.replace("const", "").strip()]


def test_functions() -> None:
    declared = {}
    for result, name, arguments in re.findall(r"([\w ]+?[ *]+)(dc_shm_\w+)\(([^)]*)\);", _code()):
        kinds = [_kind(re.sub(r"\w+$", "", argument.strip())) for argument in arguments.split(",")]
        declared[name] = (_kind(result.strip()), tuple(kinds))
    assert declared == native_shm.SIGNATURES


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name: str) -> None:
    (body,) = re.findall(rf"typedef struct {name} \{{(.*?)\}}", _code(), re.DOTALL)
    declared = []
    for line in filter(None, map(str.strip, body.split(";"))):
        type_text, field, size = re.fullmatch(r"([\w ]+?[ *]+)(\w+)(?:\[(\d+)\])?", line).groups()  # type: ignore[union-attr]
        kind = ctypes.c_void_p if "*" in type_text else SCALARS[type_text.strip()]
        declared.append((field, ctypes.sizeof(kind) * int(size or 1)))
    assert declared == [(field[0], ctypes.sizeof(field[1])) for field in STRUCTURES[name]._fields_]


def test_constants() -> None:
    statuses = {name: int(value) for name, value in re.findall(r"DC_SHM_(\w+) = (\d+)", _code())}
    for name in ("OK", "MISMATCH", "PEER_LOST", "TIMEOUT", "ABORTED", "USAGE"):
        assert getattr(native_shm, name) == statuses[name]
    defines = dict(re.findall(r"#define DC_SHM_(\w+) (\d+)", HEADER.read_text()))
    for name in ("MAX_RANKS", "DIGEST_BYTES", "TEXT_BYTES"):
        assert getattr(native_shm, name) == int(defines[name])
