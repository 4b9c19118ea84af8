# SPDX-License-Identifier: Apache-2.0
"""The NumPy folds against the oracle and against cases worked out by hand."""

import numpy as np
import pytest

from detcomm.collectives import DType, ReduceOp
from detcomm.errors import ScheduleError, UnsupportedError, UsageError
from detcomm.fold import fold as checked_fold
from detcomm.fold import premultiply as checked_premultiply
from detcomm.fold_spec import FoldSpec
from detcomm.portable_fold import BLOCK_ELEMS, portable_fold, portable_premultiply
from tests import inputs, oracle
from tests.unit import fold_cases

SUM = ReduceOp.SUM


def _words(dtype: DType, words: list[int]) -> np.ndarray:
    return np.array(words, f"uint{8 * dtype.itemsize}").view(np.uint8)


def _fold_words(dtype: DType, op: ReduceOp, operands: list[int]) -> int:
    spec = fold_cases.of_leaves(dtype, op, len(operands), "tree")
    output = fold_cases.run(portable_fold, spec, [_words(dtype, [word]) for word in operands])
    return int(output.view(f"uint{8 * dtype.itemsize}")[0])


@pytest.mark.parametrize("num_operands", [2, 3, 4, 5, 7, 8, 13])
@pytest.mark.parametrize(("dtype", "op"), fold_cases.LEGAL)
def test_bits_of_the_oracle(dtype: DType, op: ReduceOp, num_operands: int) -> None:
    operands = fold_cases.leaves(dtype, 1500, num_operands)
    for shape in ("tree", "linear"):
        for accumulate in ("float32", "wire"):
            spec = fold_cases.of_leaves(dtype, op, num_operands, shape, accumulate)
            output = fold_cases.run(portable_fold, spec, operands)
            assert np.array_equal(output, fold_cases.expected(dtype, op, operands, shape, accumulate))


@pytest.mark.parametrize("accumulate", ["float32", "wire"])
@pytest.mark.parametrize("dtype", [dtype for dtype in fold_cases.REALS if dtype.is_float])
def test_another_order_gives_other_bits(dtype: DType, accumulate: str) -> None:
    """The negative control of the test above: its inputs tell orders apart."""
    operands = fold_cases.leaves(dtype, 1500, 5)
    tree = fold_cases.expected(dtype, SUM, operands, "tree", accumulate)
    linear = fold_cases.run(portable_fold, fold_cases.of_leaves(dtype, SUM, 5, "linear", accumulate), operands)
    assert not np.array_equal(tree, linear)


@pytest.mark.parametrize("num_operands", [3, 5, 7, 8])
@pytest.mark.parametrize("accumulate", ["float32", "wire"])
@pytest.mark.parametrize(("dtype", "op"), fold_cases.LEGAL)
def test_partials_compose_to_the_same_bits(dtype: DType, op: ReduceOp, num_operands: int, accumulate: str) -> None:
    operands = fold_cases.leaves(dtype, 700, num_operands, seed=1)
    want = fold_cases.expected(dtype, op, operands, "tree", accumulate)
    for block in (block for block in (2, 4) if block < num_operands):
        got = fold_cases.blockwise(portable_fold, dtype, op, operands, block, accumulate)
        assert np.array_equal(got, want)


def test_blocks_do_not_show() -> None:
    operands = fold_cases.leaves(DType.BFLOAT16, 2 * BLOCK_ELEMS + 17, 3)
    output = fold_cases.run(portable_fold, fold_cases.of_leaves(DType.BFLOAT16, SUM, 3, "tree"), operands)
    assert np.array_equal(output, fold_cases.expected(DType.BFLOAT16, SUM, operands, "tree"))


def test_worked_by_hand() -> None:
    f32, bf16, f16, i8, u8, boolean = (
        DType.FLOAT32,
        DType.BFLOAT16,
        DType.FLOAT16,
        DType.INT8,
        DType.UINT8,
        DType.BOOL,
    )
    assert _fold_words(f32, SUM, [0x80000000, 0x80000000]) == 0x80000000  # (-0) + (-0)
    assert _fold_words(f32, SUM, [0x7F800000, 0xFF800000]) == 0x7FC00000  # inf - inf
    assert _fold_words(f32, SUM, [0xFFC12345, 0x3F800000]) == 0x7FC00000  # a payload is not passed on
    assert _fold_words(f32, SUM, [0x00000001, 0x00000001]) == 0x00000002  # subnormals are kept
    assert _fold_words(f32, ReduceOp.MIN, [0x00000000, 0x80000000]) == 0x80000000  # -0 < +0
    assert _fold_words(f32, ReduceOp.MIN, [0x80000000, 0x00000000]) == 0x80000000
    assert _fold_words(f32, ReduceOp.MAX, [0x80000000, 0x00000000]) == 0x00000000
    assert _fold_words(f32, ReduceOp.MAX, [0x7F800000, 0x7F800001]) == 0x7FC00000  # a NaN wins
    assert _fold_words(bf16, SUM, [0x3F80, 0x3B80]) == 0x3F80  # 1 + 2^-8: a tie, to the even 1
    assert _fold_words(bf16, SUM, [0x3F81, 0x3B80]) == 0x3F82  # 1.0078125 + 2^-8: a tie, up to the even
    assert _fold_words(bf16, SUM, [0x7F7F, 0x7F7F]) == 0x7F80  # overflow
    assert _fold_words(bf16, SUM, [0x7FFF, 0x3F80]) == 0x7FC0  # a NaN whose rounding would carry into the sign
    assert _fold_words(f16, SUM, [0x7BFF, 0x7BFF]) == 0x7C00
    assert _fold_words(f16, SUM, [0x7C01, 0x0000]) == 0x7E00
    assert _fold_words(i8, SUM, [127, 1]) == 128  # wraps
    assert _fold_words(i8, ReduceOp.AVG, [0xFD, 0x00]) == 0xFF  # -3 / 2 = -1
    assert _fold_words(u8, ReduceOp.AVG, [200, 100]) == 22  # (300 mod 256) / 2
    assert _fold_words(boolean, SUM, [2, 0]) == 1  # any nonzero byte is true
    assert _fold_words(boolean, ReduceOp.BXOR, [1, 1]) == 0


def test_one_rounding_or_one_at_each_addition() -> None:
    """1 + 2^-8 + 2^-8 in bfloat16: rounded once it is 1 + 2^-7, rounded each time it is 1."""
    operands = [_words(DType.BFLOAT16, [word]) for word in (0x3F80, 0x3B80, 0x3B80)]
    for accumulate, want in (("float32", 0x3F81), ("wire", 0x3F80)):
        spec = fold_cases.of_leaves(DType.BFLOAT16, SUM, 3, "linear", accumulate)
        assert fold_cases.run(portable_fold, spec, operands).view(np.uint16)[0] == want


@pytest.mark.parametrize("dtype", fold_cases.REALS)
def test_in_place_and_misaligned(dtype: DType) -> None:
    """The output is the memory of one operand, and nothing is aligned to an element."""
    operands = fold_cases.leaves(dtype, 300, 3)
    want = fold_cases.expected(dtype, SUM, operands, "tree")
    for target in range(3):
        memory = np.zeros(len(operands[0]) + 1, np.uint8)
        memory[1:] = operands[target]
        shifted = [memory[1:] if index == target else data for index, data in enumerate(operands)]
        portable_fold(
            fold_cases.of_leaves(dtype, SUM, 3, "tree", "wire" if dtype.kind != "float" else "float32"),
            shifted,
            memory[1:],
        )
        assert np.array_equal(memory[1:], want)


@pytest.mark.parametrize("factor", [0.1, -0.0, 1 / 3, 1e300, float("nan")])
@pytest.mark.parametrize("dtype", [dtype for dtype in fold_cases.REALS if dtype.is_float])
def test_premultiply(dtype: DType, factor: float) -> None:
    (data,) = fold_cases.leaves(dtype, 3000, 1)
    output = np.empty_like(data)
    portable_premultiply(dtype, factor, data, output)
    assert np.array_equal(
        output, inputs.bits(oracle.premultiply(data.view(oracle.storage(dtype.value)), dtype.value, factor))
    )


def test_refusals() -> None:
    two = [np.zeros(8, np.uint8)] * 2
    with pytest.raises(UnsupportedError, match="band is not defined on float32"):
        FoldSpec(ReduceOp.BAND, DType.FLOAT32, "float32", "tree", (True, True), True)
    with pytest.raises(UsageError, match="by their reals"):
        FoldSpec(SUM, DType.COMPLEX64, "float32", "tree", (True, True), True)
    with pytest.raises(UsageError, match="at least 2 operands, got 1"):
        FoldSpec(SUM, DType.FLOAT32, "float32", "tree", (True,), True)
    spec = fold_cases.of_leaves(DType.FLOAT32, SUM, 2, "tree")
    with pytest.raises(ScheduleError, match="operand 0 has 8 bytes, expected 4"):
        checked_fold(spec, two, np.zeros(4, np.uint8))
    with pytest.raises(ScheduleError, match="expected 2 operands, got 1"):
        checked_fold(spec, two[:1], np.zeros(8, np.uint8))
    with pytest.raises(ScheduleError, match="no whole number"):
        checked_fold(spec, two, np.zeros(7, np.uint8))
    with pytest.raises(UnsupportedError, match="premul_sum is not defined on int32"):
        checked_premultiply(DType.INT32, 2.0, two[0], two[1])
    with pytest.raises(ScheduleError, match="expected equal sizes"):
        checked_premultiply(DType.FLOAT32, 2.0, two[0], np.zeros(4, np.uint8))
