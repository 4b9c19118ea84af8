# SPDX-License-Identifier: Apache-2.0
"""The found trees, evaluated on other numbers under each model of precision, to be compared bit by bit.

A model says where sums of 16-bit types are rounded: once, at the root, after additions in float32; or at each
addition, as libraries do that add in the tensor's type at every hop.
"""

from collections.abc import Sequence

import numpy as np

from detcomm.association import Expr
from detcomm.collectives import Accumulate, DType, ReduceOp
from detcomm.fold_spec import FoldSpec
from detcomm.portable_fold import portable_fold
from detcomm.transports.base import Bytes

_ONCE, _EACH_TIME = "added in float32, rounded once", "rounded at each addition"


def models(dtype: DType) -> dict[str, Accumulate]:
    """The models of precision that differ for this type, by their names for people."""
    if dtype.itemsize > 2:
        return {f"added in {dtype.value}": "float32"}
    return {_ONCE: "float32", _EACH_TIME: "wire"}


def evaluate(expr: Expr, inputs: Sequence[Bytes], dtype: DType, accumulate: Accumulate) -> Bytes:
    """The sum of all inputs by the additions of ``expr``.

    Args:
        inputs: the contributions by rank.
    """
    return _evaluate(expr, inputs, dtype, accumulate, final=True)[0]


def _evaluate(
    expr: Expr, inputs: Sequence[Bytes], dtype: DType, accumulate: Accumulate, *, final: bool
) -> tuple[Bytes, bool]:
    """The value of a subtree, and whether it is a leaf."""
    if not isinstance(expr, tuple):
        return inputs[expr], True
    (left, left_is_leaf), (right, right_is_leaf) = (
        _evaluate(child, inputs, dtype, accumulate, final=False) for child in expr
    )
    leaves = (left_is_leaf, right_is_leaf)
    spec = FoldSpec(ReduceOp.SUM, dtype, accumulate, "linear", leaves, final)
    output = np.empty(inputs[0].size // dtype.itemsize * spec.output_dtype.itemsize, np.uint8)
    portable_fold(spec, (left, right), output)
    return output, False


def equal_elements(left: Bytes, right: Bytes, itemsize: int) -> int:
    """How many elements agree in every bit."""
    return int((left.reshape(-1, itemsize) == right.reshape(-1, itemsize)).all(axis=1).sum())
