# SPDX-License-Identifier: Apache-2.0
"""Flush to zero and other rounding in the caller's thread reach no sum of ours, and come back after it."""

import ctypes
import platform
from collections.abc import Iterator

import numpy as np
import pytest

from detcomm.collectives import DType, ReduceOp
from detcomm.float_environment import default_float_environment
from detcomm.portable_fold import portable_fold
from tests.unit import fold_cases

torch = pytest.importorskip("torch")

TINY = np.array([1e-40], np.float32)
FE_UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}


@pytest.fixture
def flushing() -> Iterator[None]:
    """A thread that flushes subnormals to zero."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _flushes() -> bool:
    return bool((TINY * np.float32(1))[0] == 0)


def test_subnormals_are_kept_inside_and_the_setting_comes_back(flushing: None) -> None:
    assert _flushes()
    with default_float_environment():
        assert not _flushes()
    assert _flushes()


def test_the_setting_comes_back_after_an_error(flushing: None) -> None:
    with pytest.raises(KeyError), default_float_environment():
        raise KeyError
    assert _flushes()


def test_rounding_mode() -> None:
    libm = ctypes.CDLL(None)
    upward = FE_UPWARD.get(platform.machine())
    if upward is None:
        pytest.skip("FE_UPWARD of this processor is not known here")
    before = libm.fegetround()
    libm.fesetround(upward)
    try:
        with default_float_environment():
            inside = libm.fegetround()
        after = libm.fegetround()
    finally:
        libm.fesetround(before)
    assert (inside, after) == (0, upward)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16, DType.FLOAT16])
def test_portable_folds_keep_subnormals(dtype: DType, flushing: None) -> None:
    word = np.array([3], f"uint{8 * dtype.itemsize}").view(np.uint8)
    output = fold_cases.run(portable_fold, fold_cases.of_leaves(dtype, ReduceOp.SUM, 2, "tree"), [word, word])
    assert output.view(f"uint{8 * dtype.itemsize}")[0] == 6
