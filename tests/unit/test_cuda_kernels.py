# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels without a GPU: their logic compiled for the host has the oracle's bits, and their PTX has no FMA.

A GPU's own arithmetic is compared with golden vectors at first use, and by ``scripts/gpu-check``.
"""

import ctypes
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detcomm.collectives import DType, ReduceOp
from detcomm.cuda import compile as cuda_compile
from detcomm.cuda.kernels import MAX_OPERANDS, PEERS, fold_defines
from detcomm.cuda.native import MAX_COPIES
from detcomm.errors import NativeError, UnsupportedError
from detcomm.fold_spec import FoldSpec
from tests import host_kernels, inputs, oracle
from tests.gpu import assembly

ROOT = Path(__file__).parents[2]

FOLD_DRIVER = """
extern "C" void run_fold(const void* const* operands, void* output, u64 count, u64 divisor, u64 num_threads) {
  Operands given;
  for (int k = 0; k < kNumInputs; ++k) given.address[k] = static_cast<const u8*>(operands[k]);
  for (u64 i = 0; i < num_threads; ++i) {
    position = {i, num_threads, 0};
    dc_fold(given, static_cast<u8*>(output), count, divisor);
  }
}
"""

COPY_DRIVER = """
extern "C" void run_copy(const void* copies, u32 num_rows, u64 num_threads) {
  for (u32 row = 0; row < num_rows; ++row) {
    for (u64 i = 0; i < num_threads; ++i) {
      position = {i, num_threads, row};
      dc_copy(*static_cast<const Copies*>(copies));
    }
  }
}
"""

PREMULTIPLY_DRIVER = """
extern "C" void run_premultiply(const void* input, void* output, u64 count, double factor) {
  for (u64 i = 0; i < 7; ++i) {
    position = {i, 7, 0};
    dc_premultiply(static_cast<const u8*>(input), static_cast<u8*>(output), count, factor);
  }
}
"""

needs_compiler = pytest.mark.skipif(host_kernels.COMPILER is None, reason="no C++ compiler here")


def _host_fold(folder: Path, spec: FoldSpec) -> Any:
    """The fold kernel of a specification, as a function of the host."""
    defines = "".join(f"#define {name} {value}\n" for name, value in fold_defines(spec).items())
    function = host_kernels.build(folder, f'{defines}#include "fold.cu"\n{FOLD_DRIVER}').run_fold
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_uint64] * 3)
    function.restype = None
    return function


def _fold(function: Any, arrays: list[Any], output: Any, count: int, divisor: int, offset: int = 0) -> None:
    """With operands ``offset`` bytes behind a 16-byte boundary; 24 threads, so that their loops turn several times."""
    rooms = [np.zeros(array.nbytes + 32, np.uint8) for array in (*arrays, output)]
    places = []
    for room, array in zip(rooms, (*arrays, output), strict=True):
        start = -room.ctypes.data % 16 + offset
        places.append(room[start : start + array.nbytes])
        places[-1][:] = inputs.bits(array)
    pointers = (ctypes.c_void_p * len(arrays))(*[place.ctypes.data for place in places[:-1]])
    function(ctypes.addressof(pointers), places[-1].ctypes.data, count, divisor, 24)
    output.view(np.uint8)[:] = places[-1]


CASES = [
    *((dtype, "sum", 8, "float32", "tree") for dtype in inputs.FLOATS),
    *((dtype, "avg", 3, "wire", "linear") for dtype in ("bfloat16", "float16")),
    ("float32", "max", 5, "float32", "tree"),
    ("bfloat16", "min", 2, "float32", "tree"),
    ("float32", "product", 16, "float32", "linear"),
    ("bfloat16", "sum", 21, "float32", "tree"),
    ("float32", "sum", 18, "float32", "linear"),
    ("int8", "avg", 4, "float32", "tree"),
    ("uint16", "product", 7, "float32", "tree"),
    ("int64", "min", 3, "float32", "tree"),
    ("uint64", "avg", 3, "float32", "tree"),
    ("bool", "sum", 5, "float32", "tree"),
    ("bool", "bxor", 4, "float32", "tree"),
]


@needs_compiler
@pytest.mark.parametrize(("dtype", "op", "num_inputs", "accumulate", "shape"), CASES)
def test_the_fold_has_the_bits_of_the_oracle(
    dtype: str, op: str, num_inputs: int, accumulate: Any, shape: Any, tmp_path: Path
) -> None:
    spec = FoldSpec(ReduceOp(op), DType(dtype), accumulate, shape, (True,) * num_inputs, True, num_inputs)
    function = _host_fold(tmp_path, spec)
    given = inputs.make(dtype, 1000, num_inputs)
    association = "tree" if shape == "tree" else "linear"
    expected = oracle.reduce(given, dtype, op, association=association, accumulate=accumulate)
    item = expected.itemsize
    for count, offset in [(1000, 0), (1000, item % 16), (999, 0), (5, 0), (1000, 1)]:
        output = np.zeros(count, expected.dtype)
        _fold(function, [array[:count] for array in given], output, count, num_inputs, offset)
        assert np.array_equal(inputs.bits(output), inputs.bits(expected[:count])), (count, offset)


@needs_compiler
@pytest.mark.parametrize("has_min_pair", [0, 1])
def test_a_pair_has_one_nan_whatever_its_neighbour(has_min_pair: int, tmp_path: Path) -> None:
    """All halves, beside a number and beside a NaN; as on GPUs with and without the instruction for it."""
    driver = """
    #include "elements.cuh"
    extern "C" void run_pairs(u32* pairs, u64 count) {
      for (u64 i = 0; i < count; ++i) pairs[i] = with_one_nan<0x7FC0u>(pairs[i]);
    }
    """
    run = host_kernels.build(tmp_path, driver, f"-DDC_HAS_MIN_PAIR={has_min_pair}").run_pairs
    run.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
    run.restype = None
    halves = np.array([half for half in range(1 << 16) if half & 0x7FFF <= 0x7F80 or half == 0x7FFF], np.uint32)
    beside = np.array([0x3F80, 0xBF80, 0x7FFF, 0x0000, 0xFF80], np.uint32)
    pairs = np.concatenate([part for other in beside for part in (halves | other << 16, other | halves << 16)])
    expected = pairs.view(np.uint16).copy()
    expected[expected == 0x7FFF] = 0x7FC0
    pairs = np.ascontiguousarray(pairs)
    run(pairs.ctypes.data, len(pairs))
    assert np.array_equal(pairs.view(np.uint16), expected)


@needs_compiler
@pytest.mark.parametrize("num_inputs", [4, 19])
def test_leaves_and_partials_mix(num_inputs: int, tmp_path: Path) -> None:
    """Partials of two leaves, and leaves, make the same tree as leaves alone."""
    leaves = tuple(k % 3 == 2 for k in range(num_inputs))
    spec = FoldSpec(ReduceOp.SUM, DType.BFLOAT16, "float32", "linear", leaves, False, 1)
    function = _host_fold(tmp_path, spec)
    narrow = inputs.make("bfloat16", 300, num_inputs)
    wide = [(array.astype(np.uint32) << 16).view(np.float32) for array in narrow]
    given = [narrow[k] if leaf else wide[k] for k, leaf in enumerate(leaves)]
    expected = oracle.reduce(wide, "float32", "sum", association="linear")
    for offset in (0, 2):
        output = np.zeros(300, np.float32)
        _fold(function, given, output, 300, 1, offset)
        assert np.array_equal(inputs.bits(output), inputs.bits(expected))


@needs_compiler
def test_copies_of_any_alignment_and_length(tmp_path: Path) -> None:
    """64 rows: sources and targets at all places relative to 16 bytes, and lengths from nothing to several vectors."""
    run = host_kernels.build(tmp_path, f'#include "copy.cu"\n{COPY_DRIVER}').run_copy
    run.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64)
    run.restype = None
    rng = np.random.default_rng(1)
    source, target = rng.integers(0, 256, 1 << 14, np.uint8), np.zeros(1 << 14, np.uint8)
    expected = target.copy()
    copies = (ctypes.c_uint64 * (3 * MAX_COPIES))()
    for row in range(MAX_COPIES):
        start, num_bytes = row * 256, int(rng.integers(0, 200)) if row else 0
        here, there = start + row % 16, start + (row * 5 + row // 16) % 16
        copies[row] = source.ctypes.data + here
        copies[MAX_COPIES + row] = target.ctypes.data + there
        copies[2 * MAX_COPIES + row] = num_bytes
        expected[there : there + num_bytes] = source[here : here + num_bytes]
    run(ctypes.addressof(copies), MAX_COPIES, 5)
    assert np.array_equal(target, expected)


@needs_compiler
@pytest.mark.parametrize("dtype", inputs.FLOATS)
def test_the_sender_multiplies_as_the_oracle_does(dtype: str, tmp_path: Path) -> None:
    text = f'#define DC_LEAF {fold_defines(_pair(dtype))["DC_LEAF"]}\n#include "premultiply.cu"\n'
    run = host_kernels.build(tmp_path, text + PREMULTIPLY_DRIVER).run_premultiply
    run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_double)
    run.restype = None
    given = inputs.rank_input(dtype, 500, 0, 2)
    for factor in (0.1, -3.0, 1e-30):
        output = np.empty_like(given)
        run(given.ctypes.data, output.ctypes.data, 500, factor)
        assert np.array_equal(inputs.bits(output), inputs.bits(oracle.premultiply(given, dtype, factor)))


def _pair(dtype: str) -> FoldSpec:
    return FoldSpec(ReduceOp.SUM, DType(dtype), "float32", "tree", (True, True), True)


def test_too_many_operands_are_refused() -> None:
    spec = FoldSpec(ReduceOp.SUM, DType.FLOAT32, "float32", "tree", (True,) * (MAX_OPERANDS + 1), True)
    with pytest.raises(UnsupportedError, match=f"a fold of {MAX_OPERANDS + 1} operands"):
        fold_defines(spec)


@pytest.mark.skipif(not host_kernels.has_nvrtc(), reason="no NVRTC here: pip install nvidia-cuda-nvrtc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(
    ("dtype", "op", "num_inputs", "accumulate"),
    [("float32", "avg", 8, "float32"), ("bfloat16", "sum", 20, "float32"), ("bfloat16", "sum", 2, "float32"),
     ("float16", "product", 3, "wire"), ("float64", "avg", 2, "float32")],
)  # fmt: skip
@pytest.mark.parametrize("file", ["fold.cu", "fold.cu of peers", "peer_fused.cu"])
def test_the_assembly_says_how_each_operation_rounds(
    dtype: str, op: str, num_inputs: int, accumulate: Any, architecture: str, file: str
) -> None:
    if file == "peer_fused.cu":
        num_inputs = min(num_inputs, 16)  # the most ranks of a block
    spec = FoldSpec(ReduceOp(op), DType(dtype), accumulate, "tree", (True,) * num_inputs, True, num_inputs)
    macros = fold_defines(spec) | (PEERS if file.endswith("of peers") else {})
    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    ptx = cuda_compile.compile_text(f'{defines}#include "{file.split()[0]}"\n', architecture).ptx
    arithmetic = re.findall(r"\b(?:add|sub|mul|div|fma|mad)\.\S*f(?:16|32|64)\b", ptx)
    assert arithmetic
    wrong = [name for name in arithmetic if ".rn." not in name or ".ftz" in name or name.startswith(("fma", "mad"))]
    assert not wrong
    assert ".ftz" not in ptx


@pytest.mark.skipif(
    not host_kernels.has_nvrtc() or assembly.cuobjdump() is None,
    reason="no NVRTC or cuobjdump here: pip install nvidia-cuda-nvrtc nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm",
)
def test_the_machine_code_of_sums_neither_fuses_nor_flushes() -> None:
    """As NVRTC makes it, and nvcc where there is one. The division of an average is made of FMAs, and they are seen."""
    for name, machine_code in assembly.sums(("NVRTC",)):
        assert assembly.wrong_instructions(machine_code) == [], name
    if shutil.which("nvcc"):
        for name, machine_code in assembly.sums(("nvcc",), assembly.SUMS[-1:]):
            assert assembly.wrong_instructions(machine_code) == [], name
    spec = FoldSpec(ReduceOp.AVG, DType.FLOAT32, "float32", "tree", (True,) * 3, True, 3)
    defines = "".join(f"#define {name} {value}\n" for name, value in fold_defines(spec).items())
    average = cuda_compile.compile_text(f'{defines}#include "fold.cu"\n', "sm_90").cubin
    assert "FFMA" in assembly.wrong_instructions(assembly.disassembled(average))


@pytest.mark.skipif(not host_kernels.has_nvrtc(), reason="no NVRTC here: pip install nvidia-cuda-nvrtc")
def test_compiled_kernels_are_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cuda_compile.CACHE_VARIABLE, str(tmp_path))
    first = cuda_compile.compile_kernel("copy.cu", {}, "sm_90")
    (file,) = tmp_path.iterdir()
    assert file.read_bytes() == first
    monkeypatch.setattr(cuda_compile, "compile_text", lambda *args: pytest.fail("compiled again"))
    assert cuda_compile.compile_kernel("copy.cu", {}, "sm_90") == first


@pytest.mark.skipif(not host_kernels.has_nvrtc(), reason="no NVRTC here: pip install nvidia-cuda-nvrtc")
def test_what_does_not_compile_says_why() -> None:
    with pytest.raises(NativeError, match="identifier"):
        cuda_compile.compile_text('#include "premultiply.cu"\n', "sm_90")
