# SPDX-License-Identifier: Apache-2.0
"""Arbitrary folds of arbitrary bytes: native, NumPy and the oracle agree on every bit."""

from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from detcomm import native
from detcomm.collectives import DType, ReduceOp, partial_dtype
from detcomm.fold_spec import FoldSpec
from detcomm.native import native_fold
from detcomm.portable_fold import portable_fold
from detcomm.transports.base import Bytes
from tests.unit import fold_cases

needs_library = pytest.mark.skipif(not native.available(), reason=f"no native library: {native.why_not()}")


def _bytes(generator: np.random.Generator, size: int, offset: int) -> Bytes:
    """Random bytes that begin ``offset`` bytes into their memory: every bit pattern, NaNs and infinities often."""
    memory = generator.integers(0, 256, offset + size, dtype=np.uint8)
    high = generator.random(offset + size) < 0.1
    memory[high] = generator.choice(np.array([0x00, 0x80, 0x7F, 0xFF], np.uint8), int(high.sum()))
    return memory[offset:]


@st.composite
def folds(draw: st.DrawFn, all_leaves: bool) -> tuple[FoldSpec, list[Bytes]]:
    """A specification and operands for it, at any address."""
    dtype, op = draw(st.sampled_from(fold_cases.LEGAL))
    accumulate = draw(st.sampled_from(("float32", "wire")))
    num_operands = draw(st.one_of(st.integers(2, 9), st.integers(10, 140)))
    mask = (True,) * num_operands
    if not all_leaves:
        mask = tuple(draw(st.lists(st.booleans(), min_size=num_operands, max_size=num_operands)))
    spec = FoldSpec(
        op,
        dtype,
        accumulate,
        draw(st.sampled_from(("tree", "linear"))),
        mask,
        True if all_leaves else draw(st.booleans()),
        num_operands if all_leaves else draw(st.integers(1, 1 << 20)),
    )
    count = draw(st.one_of(st.integers(1, 70), st.integers(500, 2200)))
    generator = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    partial = partial_dtype(op, dtype, accumulate)
    operands = [
        _bytes(generator, count * (dtype if leaf else partial).itemsize, int(generator.integers(0, 64)))
        for leaf in mask
    ]
    return spec, operands


def _check_against_oracle(fold: Callable[..., None], spec: FoldSpec, operands: list[Bytes]) -> None:
    if spec.dtype is DType.BOOL:  # the oracle's booleans are 0 or 1
        operands = [data & np.uint8(1) for data in operands]
    want = fold_cases.expected(spec.dtype, spec.op, operands, spec.shape, spec.accumulate)
    assert np.array_equal(fold_cases.run(fold, spec, operands), want)


@settings(max_examples=150)
@given(folds(all_leaves=True))
def test_portable_folds(case: tuple[FoldSpec, list[Bytes]]) -> None:
    _check_against_oracle(portable_fold, *case)


@needs_library
@settings(max_examples=250)
@given(folds(all_leaves=True))
def test_native_folds(case: tuple[FoldSpec, list[Bytes]]) -> None:
    _check_against_oracle(native_fold, *case)


@needs_library
@settings(max_examples=250)
@given(folds(all_leaves=False))
def test_native_and_portable_folds_of_leaves_and_partials(case: tuple[FoldSpec, list[Bytes]]) -> None:
    spec, operands = case
    assert np.array_equal(fold_cases.run(native_fold, spec, operands), fold_cases.run(portable_fold, spec, operands))


def test_the_property_can_fail() -> None:
    """The negative control: a fold in the other order is caught."""
    operands = fold_cases.leaves(DType.FLOAT32, 64, 5)
    spec = fold_cases.of_leaves(DType.FLOAT32, ReduceOp.SUM, 5, "tree")
    linear = fold_cases.of_leaves(DType.FLOAT32, ReduceOp.SUM, 5, "linear")
    with pytest.raises(AssertionError):
        _check_against_oracle(lambda _, inputs, output: portable_fold(linear, inputs, output), spec, operands)
