# SPDX-License-Identifier: Apache-2.0
"""The native folds, with each instruction set that this processor has, against the oracle and the NumPy folds."""

import ctypes
import platform
from collections.abc import Iterator

import numpy as np
import pytest

from detcomm import native
from detcomm.collectives import Accumulate, DType, ReduceOp
from detcomm.errors import ScheduleError
from detcomm.fold_spec import FoldSpec
from detcomm.native import native_fold, native_premultiply
from detcomm.portable_fold import portable_fold, portable_premultiply
from tests import inputs, oracle
from tests.unit import fold_cases
from tests.unit.test_float_environment import FE_UPWARD

SUM = ReduceOp.SUM
FLOATS = [dtype for dtype in fold_cases.REALS if dtype.is_float]
ACCUMULATES: tuple[Accumulate, ...] = ("float32", "wire")
VARIANTS = native.variants() if native.available() else ()

pytestmark = pytest.mark.skipif(not VARIANTS, reason=f"no native library: {native.why_not()}")


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """One instruction set, chosen for the length of a test."""
    native.select_variant(request.param)
    yield request.param
    native.select_variant(VARIANTS[0])


@pytest.mark.parametrize(("dtype", "op"), fold_cases.LEGAL)
def test_bits_of_the_oracle(variant: str, dtype: DType, op: ReduceOp) -> None:
    for num_operands in (2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 64, 71):
        count = 300 if num_operands > 8 else 1100
        operands = fold_cases.leaves(dtype, count, num_operands)
        for shape in ("tree", "linear"):
            for accumulate in ACCUMULATES:
                spec = fold_cases.of_leaves(dtype, op, num_operands, shape, accumulate)
                output = fold_cases.run(native_fold, spec, operands)
                want = fold_cases.expected(dtype, op, operands, shape, accumulate)
                assert np.array_equal(output, want), (num_operands, shape, accumulate)


@pytest.mark.parametrize(("dtype", "op"), fold_cases.LEGAL)
def test_partials_compose_to_the_same_bits(variant: str, dtype: DType, op: ReduceOp) -> None:
    for num_operands in (3, 5, 7, 8, 21):
        operands = fold_cases.leaves(dtype, 500, num_operands, seed=1)
        for accumulate in ACCUMULATES:
            want = fold_cases.expected(dtype, op, operands, "tree", accumulate)
            for block in (block for block in (2, 4, 16) if block < num_operands):
                got = fold_cases.blockwise(native_fold, dtype, op, operands, block, accumulate)
                assert np.array_equal(got, want), (num_operands, accumulate, block)


@pytest.mark.parametrize("shape", ["tree", "linear"])
@pytest.mark.parametrize("dtype", fold_cases.NARROW)
def test_leaves_and_partials_in_any_mixture(variant: str, dtype: DType, shape: str) -> None:
    """More elements than one block of inner results, so that blocks and mixtures meet."""
    generator = np.random.default_rng(7)
    for num_operands in (2, 3, 8, 9, 20, 70):
        mask = tuple(bool(bit) for bit in generator.integers(0, 2, num_operands))
        narrow = fold_cases.leaves(dtype, 1300, num_operands, seed=2)
        wide = fold_cases.leaves(DType.FLOAT32, 1300, num_operands, seed=3)
        operands = [a if leaf else b for a, b, leaf in zip(narrow, wide, mask, strict=True)]
        for final in (False, True):
            for op in (SUM, ReduceOp.AVG, ReduceOp.PRODUCT):
                spec = FoldSpec(op, dtype, "float32", shape, mask, final, num_operands)
                got = fold_cases.run(native_fold, spec, operands)
                assert np.array_equal(got, fold_cases.run(portable_fold, spec, operands)), (num_operands, final, op)


@pytest.mark.parametrize("dtype", fold_cases.NARROW)
def test_all_16_bit_values_against_a_sample(variant: str, dtype: DType) -> None:
    everything = np.arange(1 << 16, dtype=np.uint16)
    sample = np.array([*inputs.specials(dtype.value), 0x0101, 0x3C01, 0x3F81, 0xBF80, 0x4248, 0xC2F7], np.uint16)
    for other in sample:
        pair = [everything.view(np.uint8), np.full_like(everything, other).view(np.uint8)]
        for op in (SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
            for accumulate in ACCUMULATES:
                spec = fold_cases.of_leaves(dtype, op, 2, "tree", accumulate)
                got = fold_cases.run(native_fold, spec, pair)
                assert np.array_equal(got, fold_cases.expected(dtype, op, pair, "tree", accumulate)), (other, op)
            partial = FoldSpec(op, dtype, "float32", "tree", (True, True), False, 2)
            got = fold_cases.run(native_fold, partial, pair)
            assert np.array_equal(got, fold_cases.run(portable_fold, partial, pair)), (other, op)


@pytest.mark.parametrize("dtype", fold_cases.NARROW)
def test_rounding_to_16_bits(variant: str, dtype: DType) -> None:
    """Every 16-bit value, the points around it and around the middle to the next one, as float32 partials."""
    values = oracle.widen(np.arange(1 << 16, dtype=np.uint16).view(oracle.storage(dtype.value)), dtype.value)
    words = values.view(np.uint32)[:, None]
    spacing = 16 if dtype is DType.BFLOAT16 else 13
    middle = 1 << (spacing - 1)
    steps = np.array([0, 1, middle - 1, middle, middle + 1, (1 << spacing) - 1], np.uint32)
    around = np.unique((words + steps).ravel())
    subnormal = (np.arange(1 << 14, dtype=np.float64) / 8 * 2.0**-24).astype(np.float32)  # eighths of binary16's
    around = np.concatenate([around, subnormal.view(np.uint32), subnormal.view(np.uint32) ^ np.uint32(1 << 31)])
    zeros = np.full_like(around, 1 << 31)  # -0 leaves all else as it is
    spec = FoldSpec(SUM, dtype, "float32", "tree", (False, False), True, 2)
    got = fold_cases.run(native_fold, spec, [around.view(np.uint8), zeros.view(np.uint8)])
    assert np.array_equal(got, inputs.bits(oracle.narrow(around.view(np.float32), dtype.value)))


@pytest.mark.parametrize("dtype", fold_cases.REALS)
def test_every_length_and_alignment(variant: str, dtype: DType) -> None:
    """Lengths around whole batches; operands and output at odd addresses, the bytes around the output untouched."""
    generator = np.random.default_rng(11)
    for count in range(1, 140):
        operands = fold_cases.leaves(dtype, count, 3, seed=count)
        shifted = []
        for data in operands:
            offset = int(generator.integers(0, 64))
            memory = np.zeros(offset + len(data), np.uint8)
            memory[offset:] = data
            shifted.append(memory[offset:])
        offset = int(generator.integers(0, 64))
        memory = np.full(offset + len(operands[0]) + 64, 0xA5, np.uint8)
        output = memory[offset : offset + len(operands[0])]
        native_fold(fold_cases.of_leaves(dtype, SUM, 3, "tree"), shifted, output)
        assert np.array_equal(output, fold_cases.expected(dtype, SUM, operands, "tree")), count
        assert (memory[:offset] == 0xA5).all()
        assert (memory[offset + len(output) :] == 0xA5).all()


@pytest.mark.parametrize("num_operands", [3, 8, 20])
@pytest.mark.parametrize("shape", ["tree", "linear"])
@pytest.mark.parametrize("dtype", fold_cases.REALS)
def test_in_place(variant: str, dtype: DType, shape: str, num_operands: int) -> None:
    operands = fold_cases.leaves(dtype, 1500, num_operands)
    want = fold_cases.expected(dtype, SUM, operands, shape)
    for target in (0, num_operands // 2, num_operands - 1):
        memory = operands[target].copy()
        given = [memory if index == target else data for index, data in enumerate(operands)]
        native_fold(fold_cases.of_leaves(dtype, SUM, num_operands, shape), given, memory)
        assert np.array_equal(memory, want), target


@pytest.mark.parametrize("dtype", FLOATS)
def test_premultiply(variant: str, dtype: DType) -> None:
    for count in (1, 63, 3000):
        (data,) = fold_cases.leaves(dtype, count, 1)
        for factor in (0.1, -0.0, 1 / 3, 1e300, 1e-300, float("inf"), float("nan")):
            want, got = np.empty_like(data), data.copy()
            portable_premultiply(dtype, factor, data, want)
            native_premultiply(dtype, factor, got, got)
            assert np.array_equal(got, want), (count, factor)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_thread_may_flush_subnormals(variant: str, dtype: DType) -> None:
    torch = pytest.importorskip("torch")
    word = np.full(40, 3, f"uint{8 * dtype.itemsize}").view(np.uint8)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        output = fold_cases.run(native_fold, fold_cases.of_leaves(dtype, SUM, 2, "tree"), [word, word])
        still_flushes = bool((np.array([1e-40], np.float32) * np.float32(1))[0] == 0)
    finally:
        torch.set_flush_denormal(False)
    assert (output.view(f"uint{8 * dtype.itemsize}") == 6).all()
    assert still_flushes


@pytest.mark.skipif(platform.machine() not in FE_UPWARD, reason="FE_UPWARD of this processor is not known here")
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_thread_may_round_another_way(variant: str, dtype: DType) -> None:
    operands = fold_cases.leaves(dtype, 1100, 5, seed=4)
    spec = fold_cases.of_leaves(dtype, SUM, 5, "tree")
    want = fold_cases.expected(dtype, SUM, operands, "tree")
    upward = FE_UPWARD[platform.machine()]
    libm = ctypes.CDLL(None)
    one, small = np.ones(1, np.float32), np.float32(2.0**-25)
    libm.fesetround(upward)
    try:
        rounds_up = bool((one + small)[0] > 1)  # the control: this thread's own sums come out otherwise
        output = fold_cases.run(native_fold, spec, operands)
        after = libm.fegetround()
    finally:
        libm.fesetround(0)
    assert rounds_up
    assert after == upward
    assert np.array_equal(output, want)


def test_overlap_is_refused_and_nothing_is_written(variant: str) -> None:
    memory = np.arange(64, dtype=np.uint8)
    before = memory.copy()
    spec = fold_cases.of_leaves(DType.FLOAT32, SUM, 2, "tree")
    with pytest.raises(ScheduleError, match="overlaps operand 1"):
        native_fold(spec, [np.zeros(32, np.uint8), memory[:32]], memory[4:36])
    to_partial = FoldSpec(SUM, DType.BFLOAT16, "float32", "tree", (True, True), False)
    with pytest.raises(ScheduleError, match="overlaps operand 0"):  # the same address, elements of another size
        native_fold(to_partial, [memory[:8], np.zeros(8, np.uint8)], memory[:16])
    with pytest.raises(ScheduleError, match="overlaps the input"):
        native_premultiply(DType.FLOAT32, 2.0, memory[:8], memory[4:12])
    assert np.array_equal(memory, before)
