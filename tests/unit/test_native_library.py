# SPDX-License-Identifier: Apache-2.0
"""The ctypes view agrees with the headers, and the library is found, refused or done without for the right reasons."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detcomm import fold as fold_module
from detcomm import native
from detcomm.collectives import DType, ReduceOp
from detcomm.errors import NativeError
from detcomm.fold import PortableFoldWarning, fold
from detcomm.fold_spec import FoldSpec

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "native" / "include" / "detcomm.h"

pytestmark = pytest.mark.skipif(not HEADER.is_file(), reason="the native sources are not beside the tests")

needs_library = pytest.mark.skipif(not native.available(), reason=f"no native library: {native.why_not()}")

C_TYPES: dict[str, Any] = {
    "dc_status": ctypes.c_int,
    "dc_dtype": ctypes.c_int,
    "double": ctypes.c_double,
    "size_t": ctypes.c_size_t,
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "void": None,
}


def _code(header: Path) -> str:
    """The header without comments and preprocessor lines."""
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
    return re.sub(r"^#.*$", "", text, flags=re.MULTILINE)


def _declared(header: Path) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    functions = {}
    for result, name, arguments in re.findall(r"^([\w ]+?[ *]+)(dc_\w+)\(([^)]*)\);", _code(header), re.MULTILINE):
        parameters = [] if arguments.strip() == "void" else arguments.split(",")
        functions[name] = (_ctype(result), tuple(_ctype(_type_of(parameter)) for parameter in parameters))
    return functions


def _type_of(parameter: str) -> str:
    return re.sub(r"\w+$", "", parameter.strip())


def _ctype(text: str) -> Any:
    words = text.replace("const", "").replace(" ", "").strip()
    if words == "char*":
        return ctypes.c_char_p
    if words.endswith("*"):
        return ctypes.c_void_p
    return C_TYPES[words]


def _enumerators(prefix: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(rf"\b{prefix}(\w+) = (\d+)", _code(HEADER))}


def test_signatures() -> None:
    assert _declared(HEADER) == native.SIGNATURES


@pytest.mark.parametrize("more", ["", "struct only_in_cpp { int &reference; };\n"], ids=["headers", "control"])
def test_the_headers_are_c99(more: str, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    headers = sorted(HEADER.parent.glob("*.h"))
    assert len(headers) == 2
    file = tmp_path / "includes.c"
    file.write_text("".join(f'#include "{header}"\n' for header in headers) + more)
    strict = ["-std=c99", "-pedantic-errors", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    done = subprocess.run([compiler, *strict, str(file)], capture_output=True, text=True)
    assert (done.returncode == 0) == (more == ""), done.stderr


def test_a_wrong_signature_would_be_seen() -> None:
    """The negative control: the header's text decides what is declared."""
    declared = _declared(HEADER)
    assert declared["dc_premultiply"][1][1] is ctypes.c_double
    assert declared["dc_fold_variants"] == (ctypes.c_char_p, ())


def test_structure() -> None:
    (body,) = re.findall(r"typedef struct dc_fold_spec \{(.*?)\}", _code(HEADER), re.DOTALL)
    fields = [line.split() for line in body.replace("*", "").split(";") if line.strip()]
    assert [field[-1] for field in fields] == [field[0] for field in native.CFoldSpec._fields_]
    sizes = {"uint64_t": 8, "const": 8}  # `const` begins the one pointer
    assert [sizes.get(field[0], 4) for field in fields] == [
        ctypes.sizeof(field[1]) for field in native.CFoldSpec._fields_
    ]


def test_values() -> None:
    names = _enumerators("DC_")
    assert {dtype.name: number for dtype, number in native.DTYPES.items()}.items() <= names.items()
    assert set(native.DTYPES) == {dtype for dtype in DType if dtype.kind != "complex"}
    ops = {op.name: number for op, number in native.OPS.items() if op is not ReduceOp.PREMUL_SUM}
    assert ops.items() <= names.items()
    assert set(native.OPS) == set(ReduceOp)
    assert {f"ACCUMULATE_{name.upper()}": number for name, number in native.ACCUMULATE.items()}.items() <= names.items()
    assert {f"SHAPE_{name.upper()}": number for name, number in native.SHAPES.items()}.items() <= names.items()
    (version,) = re.findall(r"#define DC_ABI_VERSION (\d+)", HEADER.read_text())
    assert int(version) == native.ABI_VERSION


def _search(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    """Why a search with these variables finds nothing to use."""
    for name in ("DETCOMM_NATIVE", "DETCOMM_NATIVE_LIBRARY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found, why = native._search.__wrapped__()
    assert (found is None) == bool(why)
    return why


def test_disabled_or_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert _search(monkeypatch, DETCOMM_NATIVE="0") == "DETCOMM_NATIVE=0 is set"
    path = tmp_path / "nothing.so"
    assert f"no file at {path}" in _search(monkeypatch, DETCOMM_NATIVE_LIBRARY=str(path))
    path.write_text("not a library")
    assert f"{path} cannot be loaded" in _search(monkeypatch, DETCOMM_NATIVE_LIBRARY=str(path))


@needs_library
def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = native.library()
    assert loaded is not None
    monkeypatch.setattr(native, "_load", lambda path: loaded)
    monkeypatch.setattr(native.detcomm, "__path__", [str(HEADER.parent)])
    monkeypatch.setattr(native, "FILE_NAME", HEADER.name)
    monkeypatch.setattr(native, "source_hash", lambda: loaded.dc_source_hash().decode())
    assert _search(monkeypatch) == ""
    monkeypatch.setattr(native, "source_hash", lambda: None)  # no sources beside the package: nothing to compare
    assert _search(monkeypatch) == ""
    monkeypatch.setattr(native, "source_hash", lambda: "0" * 64)
    assert "was built from other sources" in _search(monkeypatch)
    monkeypatch.setattr(native, "ABI_VERSION", 0)
    assert f"has interface version {loaded.dc_abi_version()}, expected 0" in _search(monkeypatch)


def test_folds_without_the_library_say_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = FoldSpec(ReduceOp.SUM, DType.INT8, "float32", "tree", (True, True), True)
    one, two = np.ones(1, np.uint8), np.zeros(1, np.uint8)
    monkeypatch.setattr(native, "_search", lambda: (None, "it was taken away"))
    monkeypatch.delenv("DETCOMM_NATIVE", raising=False)
    fold_module._native.cache_clear()
    try:
        with pytest.warns(PortableFoldWarning, match="slower: it was taken away"):
            fold(spec, [one, one], two)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fold(spec, [one, one], two)
        fold_module._native.cache_clear()
        monkeypatch.setenv("DETCOMM_NATIVE", "0")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # asked for, so nothing to say
            fold(spec, [one, one], two)
    finally:
        fold_module._native.cache_clear()
    assert two[0] == 2


def test_an_edited_source_has_another_hash(tmp_path: Path) -> None:
    copy = tmp_path / "native"
    shutil.copytree(ROOT / "native", copy)
    before = native.source_hash(copy)
    assert before == native.source_hash(ROOT / "native")
    with (copy / "src" / "fold.cpp").open("a") as source:
        source.write("// edited\n")
    assert native.source_hash(copy) != before
    assert native.source_hash(tmp_path / "elsewhere") is None


@pytest.mark.skipif(native.disabled(), reason="DETCOMM_NATIVE=0 is set")
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler here")
def test_where_it_can_be_built_it_is_there_and_current() -> None:
    """Otherwise the tests of the native folds would be skipped, and nobody would see it."""
    assert native.available(), native.why_not()


@pytest.mark.skipif("DETCOMM_NATIVE_LIBRARY" in os.environ, reason="a library was given, whatever its sources")
@needs_library
def test_the_library_knows_its_sources() -> None:
    loaded = native.library()
    assert loaded is not None
    assert loaded.dc_source_hash().decode() == native.source_hash(ROOT / "native")


@needs_library
def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(NativeError, match=r"expected one of .*portable, got mmx"):
        native.select_variant("mmx")
    assert native.variants()[-1] == "portable"


@needs_library
def test_the_c_functions_refuse_what_has_no_meaning() -> None:
    loaded = native.library()
    assert loaded is not None
    data = np.zeros(8, np.uint8)
    address = data.ctypes.data
    two = (ctypes.c_void_p * 2)(address, address)

    def status(count: int = 2, inputs: Any = two, **fields: int) -> tuple[int, str]:
        values = {"op": 0, "dtype": 0, "num_inputs": 2, "divisor": 1} | fields
        spec = native.CFoldSpec(**values)
        return loaded.dc_fold(ctypes.byref(spec), inputs, address, count), loaded.dc_last_error().decode()

    assert status()[0] == 0
    assert status(count=0, inputs=None)[0] == 0
    assert status(op=8) == (1, "fold: no operation has the value 8")
    assert status(dtype=13) == (1, "fold: no type has the value 13")
    assert status(accumulate=2) == (1, "fold: no accumulation has the value 2")
    assert status(shape=-1) == (1, "fold: no shape has the value -1")
    assert status(num_inputs=1) == (1, "fold: expected at least 2 operands, got 1")
    assert status(op=native.OPS[ReduceOp.BXOR]) == (2, "fold: bxor is not defined on float32")
    assert status(op=1, is_final=1, divisor=0) == (1, "fold: expected a divisor of 1 ... 2^63 - 1, got 0")
    assert status(inputs=None) == (1, "fold: inputs or output are NULL")
    assert status(inputs=(ctypes.c_void_p * 2)(address, None)) == (1, "fold: operand 1 is NULL")
    assert loaded.dc_fold(None, two, address, 2) == 1
    assert loaded.dc_premultiply(4, 1.0, address, address, 1) == 2
    assert loaded.dc_last_error() == b"premultiply: expected a floating-point type, got int8"


@needs_library
def test_a_fold_lets_other_threads_run() -> None:
    """No thread is interrupted here: another one runs only while a call has released the interpreter's lock."""
    loaded = native.library()
    assert loaded is not None
    holding = ctypes.PyDLL(loaded._name)
    data = np.zeros(4 << 20, np.uint8)
    two = (ctypes.c_void_p * 2)(data.ctypes.data, data.ctypes.data)
    spec = ctypes.byref(native.CFoldSpec(num_inputs=2, divisor=1, is_final=1))
    interval = sys.getswitchinterval()

    def other_ran(fold: Any, num_calls: int) -> bool:
        ran: list[int] = []
        start, done = threading.Lock(), threading.Lock()
        start.acquire()
        done.acquire()

        def append() -> None:
            with start:
                ran.append(1)
            done.release()

        thread = threading.Thread(target=append)
        thread.start()
        sys.setswitchinterval(1000.0)
        try:
            start.release()
            for _ in range(num_calls):
                assert fold(spec, two, data.ctypes.data, 1 << 20) == 0
                if ran:
                    break
            return bool(ran)
        finally:
            done.acquire()
            sys.setswitchinterval(interval)
            thread.join()

    holding.dc_fold.argtypes = native.SIGNATURES["dc_fold"][1]
    assert not other_ran(holding.dc_fold, 50), "the control holds the lock"
    assert other_ran(loaded.dc_fold, 10_000)
