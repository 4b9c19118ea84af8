# SPDX-License-Identifier: Apache-2.0
"""Folds in NumPy: the same bits as the native library, for machines where it could not be built.

Elementwise ufuncs in a written-out order, on one thread, block by block so that temporaries stay in the cache.
No reduction function of NumPy is used: their order of additions is their own business. ``docs/numerics.md`` is
the specification. Knows neither ranks nor buffers' owners.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detcomm.association import Shape, split
from detcomm.collectives import DType, ReduceOp
from detcomm.float_environment import default_float_environment
from detcomm.fold_spec import FoldSpec
from detcomm.transports.base import Bytes

Array = NDArray[Any]
"""Values of one block, in the type in which they are computed."""

BLOCK_ELEMS = 1 << 14
"""Elements of one block: 64 KiB of float32, so that the few temporaries of a fold stay in the L2 cache."""

_STORED = {DType.BFLOAT16: np.dtype(np.uint16)}
_STORED |= {dtype: np.dtype(dtype.value) for dtype in DType if dtype is not DType.BFLOAT16}
"""How NumPy holds each type in memory. It has no bfloat16: those are the upper halves of float32."""

_CANONICAL_NAN: dict[np.dtype[Any], Any] = {
    np.dtype(np.float32): np.uint32(0x7FC00000),
    np.dtype(np.float64): np.uint64(0x7FF8 << 48),
}


def portable_fold(spec: FoldSpec, inputs: Sequence[Bytes], output: Bytes) -> None:
    """Combine ``inputs`` in the order of ``spec`` and store the outcome, rounded once.

    Args:
        spec: operation, types and order.
        inputs: operands in leaf order, each ``count`` elements of ``spec.input_dtypes``; any alignment.
        output: ``count`` elements of ``spec.output_dtype``; may be the memory of an operand of equal element size.
    """
    operands = [data.view(_STORED[dtype]) for data, dtype in zip(inputs, spec.input_dtypes, strict=True)]
    stored = output.view(_STORED[spec.output_dtype])
    narrow = spec.dtype if spec.accumulate == "wire" else None
    combine = _combination(spec.op, spec.dtype, narrow)
    with default_float_environment(), np.errstate(all="ignore"):
        for start in range(0, len(stored), BLOCK_ELEMS):
            block = slice(start, start + BLOCK_ELEMS)
            values = [_load(operand[block], dtype) for operand, dtype in zip(operands, spec.input_dtypes, strict=True)]
            value = _combine_all(spec.shape, values, combine)
            if spec.divides:
                value = _divide(value, spec.divisor)
            stored[block] = _store(value, spec.output_dtype)


def portable_premultiply(dtype: DType, factor: float, input: Bytes, output: Bytes) -> None:
    """What the sender of a PREMUL_SUM does: ``output = input * factor``, rounded to ``dtype``.

    ``factor`` is rounded to the accumulator's precision first. ``output`` may be the memory of ``input``.
    """
    source, target = input.view(_STORED[dtype]), output.view(_STORED[dtype])
    with default_float_environment(), np.errstate(all="ignore"):
        for start in range(0, len(source), BLOCK_ELEMS):
            block = slice(start, start + BLOCK_ELEMS)
            values = _load(source[block], dtype)
            target[block] = _store(values * values.dtype.type(factor), dtype)


def _load(stored: Array, dtype: DType) -> Array:
    """Values as they are computed with: 16-bit floats become float32, exactly."""
    if dtype is DType.BFLOAT16:
        wide: Array = stored.astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32)
    if dtype is DType.FLOAT16:
        return stored.astype(np.float32)
    if dtype is DType.BOOL:
        return np.not_equal(stored.view(np.uint8), 0)
    return stored


def _store(values: Array, dtype: DType) -> Array:
    """Values as they lie in memory: rounded to nearest even, a NaN in its one canonical pattern."""
    if values.dtype.kind != "f":
        return values
    values = _canonical(values)
    if dtype is DType.BFLOAT16:
        return (_round_to_bfloat16(values) >> np.uint32(16)).astype(np.uint16)
    if dtype is DType.FLOAT16:
        return values.astype(np.float16)  # bits: a canonical NaN becomes 0x7e00, its leading fraction bits
    return values


def _canonical(values: Array) -> Array:
    """A copy in which each NaN has the canonical pattern: hardware differs in sign and payload."""
    nan = _CANONICAL_NAN[values.dtype]
    bits: Array = np.where(np.isnan(values), nan, values.view(nan.dtype))  # bits: one NaN
    return bits.view(values.dtype)


def _round_to_bfloat16(values: Array) -> NDArray[np.uint32]:
    """Bits of the nearest bfloat16, as those of a float32. ``values`` hold canonical NaNs alone."""
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return (bits + (np.uint32(0x7FFF) + odd)) & np.uint32(0xFFFF0000)  # bits: nearest, ties to even


Combination = Callable[[Array, Array], Array]
"""``(left, right) -> value``. Makes a new array, so operands may be the caller's memory."""


def _combine_all(shape: Shape, values: Sequence[Array], combine: Combination) -> Array:
    if shape == "linear":
        value = values[0]
        for right in values[1:]:
            value = combine(value, right)  # bits: the running value is the left operand
        return value
    if len(values) == 1:
        return values[0]
    left = split(len(values))
    return combine(  # bits: RFC 6962's split
        _combine_all(shape, values[:left], combine), _combine_all(shape, values[left:], combine)
    )


def _combination(op: ReduceOp, dtype: DType, narrow: DType | None) -> Combination:
    if dtype is DType.BOOL:
        return _BOOL[op]
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return (_minimum if op is ReduceOp.MIN else _maximum) if dtype.is_float else _INTEGER_EXTREMES[op]
    combine = _ARITHMETIC[op]
    if narrow in (DType.BFLOAT16, DType.FLOAT16):
        return lambda left, right: _load(_store(combine(left, right), narrow), narrow)  # bits: rounded each time
    return combine


_ARITHMETIC: dict[ReduceOp, Combination] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PREMUL_SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
_INTEGER_EXTREMES: dict[ReduceOp, Combination] = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}
_BOOL: dict[ReduceOp, Combination] = {
    ReduceOp.SUM: np.logical_or,
    ReduceOp.MAX: np.logical_or,
    ReduceOp.BOR: np.logical_or,
    ReduceOp.PRODUCT: np.logical_and,
    ReduceOp.MIN: np.logical_and,
    ReduceOp.BAND: np.logical_and,
    ReduceOp.BXOR: np.logical_xor,
}


def _minimum(left: Array, right: Array) -> Array:
    """IEEE 754-2019 ``minimum``: a NaN wins, -0 is below +0."""
    bits = _CANONICAL_NAN[left.dtype].dtype
    both = (left.view(bits) | right.view(bits)).view(left.dtype)  # bits: of -0 and +0, or two equal values
    return np.where(left == right, both, np.minimum(left, right))


def _maximum(left: Array, right: Array) -> Array:
    """IEEE 754-2019 ``maximum``: a NaN wins, +0 is above -0."""
    bits = _CANONICAL_NAN[left.dtype].dtype
    both = (left.view(bits) & right.view(bits)).view(left.dtype)  # bits: of -0 and +0, or two equal values
    return np.where(left == right, both, np.maximum(left, right))


def _divide(values: Array, divisor: int) -> Array:
    if values.dtype.kind == "f":
        quotient: Array = values / values.dtype.type(divisor)  # bits: one IEEE division, no product with 1/N
        return quotient
    wide = values.astype(np.int64 if values.dtype.kind == "i" else np.uint64)
    whole: Array = wide // wide.dtype.type(divisor)
    inexact: Array = wide % wide.dtype.type(divisor) != 0
    whole += (inexact & (wide < 0)).astype(wide.dtype)  # bits: truncated toward zero
    return whole.astype(values.dtype)
