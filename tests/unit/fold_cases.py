# SPDX-License-Identifier: Apache-2.0
"""Folds that every implementation must get right, and what the oracle says. Knows no implementation."""

from collections.abc import Callable, Sequence

import numpy as np

from detcomm.association import Shape
from detcomm.collectives import Accumulate, DType, ReduceOp
from detcomm.fold_spec import FoldSpec
from detcomm.transports.base import Bytes
from tests import inputs, oracle

Fold = Callable[[FoldSpec, Sequence[Bytes], Bytes], None]

REALS = [dtype for dtype in DType if dtype.kind != "complex"]
LEGAL = [(dtype, ReduceOp(name)) for dtype in REALS for name in inputs.legal_ops(dtype.value)]
NARROW = (DType.BFLOAT16, DType.FLOAT16)


def run(fold: Fold, spec: FoldSpec, operands: Sequence[Bytes]) -> Bytes:
    """The output of one fold into fresh memory that holds garbage before."""
    count = len(operands[0]) // spec.input_dtypes[0].itemsize
    output = np.full(count * spec.output_dtype.itemsize, 0xA5, np.uint8)
    fold(spec, operands, output)
    return output


def leaves(dtype: DType, count: int, num_operands: int, seed: int = 0) -> list[Bytes]:
    """Contributions that can fail, as bytes."""
    return [inputs.bits(array) for array in inputs.make(dtype.value, count, num_operands, seed)]


def expected(
    dtype: DType, op: ReduceOp, operands: Sequence[Bytes], shape: Shape, accumulate: Accumulate = "float32"
) -> Bytes:
    """The oracle's bits of one reduction. A fold's PREMUL_SUM is a SUM: its sender has multiplied."""
    arrays = [data.view(oracle.storage(dtype.value)) for data in operands]
    name = "sum" if op is ReduceOp.PREMUL_SUM else op.value
    return inputs.bits(oracle.reduce(arrays, dtype.value, name, association=shape, accumulate=accumulate))


def of_leaves(
    dtype: DType, op: ReduceOp, num_operands: int, shape: Shape, accumulate: Accumulate = "float32"
) -> FoldSpec:
    """The fold that makes a result of leaves alone."""
    return FoldSpec(op, dtype, accumulate, shape, (True,) * num_operands, True, num_operands)


def blockwise(
    fold: Fold,
    dtype: DType,
    op: ReduceOp,
    operands: Sequence[Bytes],
    block: int,
    accumulate: Accumulate = "float32",
) -> Bytes:
    """A tree over all operands that is made of partials over aligned blocks; a block of one stays a leaf.

    ``block`` is a power of two, so these are subtrees, and the bits must be those of one fold.
    """
    parts: list[Bytes] = []
    is_leaf: list[bool] = []
    for start in range(0, len(operands), block):
        group = operands[start : start + block]
        is_leaf.append(len(group) == 1)
        if len(group) == 1:
            parts.append(group[0])
            continue
        spec = FoldSpec(op, dtype, accumulate, "tree", (True,) * len(group), False, len(operands))
        parts.append(run(fold, spec, group))
    final = FoldSpec(op, dtype, accumulate, "tree", tuple(is_leaf), True, len(operands))
    return run(fold, final, parts)
