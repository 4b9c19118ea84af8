# SPDX-License-Identifier: Apache-2.0
"""The ctypes view agrees with the headers, and the library is found, refused or done without for the right reasons."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detcomm import native
from detcomm.collectives import DType, ReduceOp
from detcomm.errors import NativeError

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


def _why_not(**environment: str) -> str:
    code = "from detcomm import native; print(native.available(), native.why_not())"
    finished = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return finished.stdout.strip()


def test_disabled_or_elsewhere(tmp_path: Path) -> None:
    assert _why_not(DETCOMM_NATIVE="0") == "False DETCOMM_NATIVE=0 is set"
    missing = tmp_path / "nothing.so"
    assert f"False no file at {missing}" in _why_not(DETCOMM_NATIVE_LIBRARY=str(missing))
    missing.write_text("not a library")
    assert f"False {missing} cannot be loaded" in _why_not(DETCOMM_NATIVE_LIBRARY=str(missing))


def test_folds_without_the_library_say_so_once() -> None:
    code = (
        "import warnings; import numpy as np\n"
        "from detcomm.fold import FoldSpec, fold\n"
        "from detcomm.collectives import DType, ReduceOp\n"
        "spec = FoldSpec(ReduceOp.SUM, DType.INT8, 'float32', 'tree', (True, True), True)\n"
        "one = np.ones(1, np.uint8)\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(3): fold(spec, [one, one], one)\n"
        "print(one[0], [str(w.message).split(':')[0] for w in caught])\n"
    )
    for environment, said in (
        ({"DETCOMM_NATIVE_LIBRARY": "/nowhere"}, ["detcomm folds in NumPy, with the same bits but slower"]),
        ({"DETCOMM_NATIVE": "0"}, []),
    ):
        finished = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        assert finished.stdout.strip() == f"8 {said}"


def test_an_edited_source_has_another_hash(tmp_path: Path) -> None:
    copy = tmp_path / "native"
    shutil.copytree(ROOT / "native", copy)
    before = native.source_hash(copy)
    assert before == native.source_hash(ROOT / "native")
    with (copy / "src" / "fold.cpp").open("a") as source:
        source.write("// edited\n")
    assert native.source_hash(copy) != before
    assert native.source_hash(tmp_path / "elsewhere") is None


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
