# SPDX-License-Identifier: Apache-2.0
"""The executor's door to the folds: checks the memory, then runs native code where there is some, else NumPy.

Both give the same bits. Knows neither ranks nor plans.
"""

import warnings
from collections.abc import Sequence
from functools import cache, lru_cache

from detcomm import native
from detcomm.collectives import DType
from detcomm.errors import ScheduleError, UnsupportedError
from detcomm.fold_spec import FoldSpec
from detcomm.portable_fold import portable_fold, portable_premultiply
from detcomm.transports.base import Bytes

__all__ = ["FoldSpec", "PortableFoldWarning", "fold", "premultiply"]


class PortableFoldWarning(RuntimeWarning):
    """Folds run in NumPy, since there is no native library: the same bits, slower. Said once."""


def fold(spec: FoldSpec, inputs: Sequence[Bytes], output: Bytes) -> None:
    """Combine ``inputs`` in the order of ``spec`` and store the outcome, rounded once.

    Args:
        spec: operation, types and order.
        inputs: operands in leaf order, each ``count`` elements of ``spec.input_dtypes``; any alignment.
        output: ``count`` elements of ``spec.output_dtype``. It may be exactly the memory of operands of
            the same element size, and must not overlap an operand otherwise.

    Raises:
        ScheduleError: operands and output do not fit each other, or overlap.
    """
    if not _check_sizes(spec, inputs, output):
        return
    if _native():
        native.native_fold(spec, inputs, output)
        return
    for index, (data, dtype) in enumerate(zip(inputs, spec.input_dtypes, strict=True)):
        if _clash(data, dtype, output, spec.output_dtype):
            raise ScheduleError(f"fold: the output overlaps operand {index} without being its memory")
    portable_fold(spec, inputs, output)


def premultiply(dtype: DType, factor: float, input: Bytes, output: Bytes) -> None:
    """What the sender of a PREMUL_SUM does: ``output = input * factor``, rounded to ``dtype``.

    Args:
        dtype: a floating-point type.
        factor: rounded to the accumulator's precision (float64 for float64, else float32) before it is used.
        input: elements of ``dtype``.
        output: as many; may be exactly the memory of ``input``.

    Raises:
        UnsupportedError: ``dtype`` is not a floating-point type.
        ScheduleError: sizes differ or are no whole number of elements, or the memory overlaps otherwise.
    """
    if not dtype.is_float:
        raise UnsupportedError(f"premul_sum is not defined on {dtype.value}; it takes floating-point types")
    if len(input) != len(output) or len(input) % dtype.itemsize:
        raise ScheduleError(
            f"premul_sum: input of {len(input)} and output of {len(output)} bytes; expected equal sizes, "
            f"multiples of {dtype.itemsize}"
        )
    if not len(input):
        return
    if _native():
        native.native_premultiply(dtype, factor, input, output)
        return
    if _clash(input, dtype, output, dtype):
        raise ScheduleError("premul_sum: the output overlaps the input without being its memory")
    portable_premultiply(dtype, factor, input, output)


@cache
def _native() -> bool:
    """Whether to fold natively; says so once if not, unless the environment asked for it."""
    if not native.available() and not native.disabled():
        warnings.warn(
            f"detcomm folds in NumPy, with the same bits but slower: {native.why_not()}",
            PortableFoldWarning,
            stacklevel=3,
        )
    return native.available()


def _clash(input: Bytes, input_dtype: DType, output: Bytes, output_dtype: DType) -> bool:
    """Whether the two overlap in any way but element on element."""
    first, target = input.ctypes.data, output.ctypes.data
    if first == target and input_dtype.itemsize == output_dtype.itemsize:
        return False
    return first < target + len(output) and target < first + len(input)


def _check_sizes(spec: FoldSpec, inputs: Sequence[Bytes], output: Bytes) -> int:
    if len(inputs) != len(spec.leaves):
        raise ScheduleError(f"fold: expected {len(spec.leaves)} operands, got {len(inputs)}")
    input_items, output_item = _item_sizes(spec)
    count, rest = divmod(len(output), output_item)
    if rest:
        raise ScheduleError(f"fold: output of {len(output)} bytes is no whole number of {spec.output_dtype.value}")
    for index, (data, item) in enumerate(zip(inputs, input_items, strict=True)):
        if len(data) != count * item:
            raise ScheduleError(
                f"fold: operand {index} has {len(data)} bytes, expected {count * item} "
                f"({count} of {spec.input_dtypes[index].value})"
            )
    return count


@lru_cache(maxsize=1024)
def _item_sizes(spec: FoldSpec) -> tuple[tuple[int, ...], int]:
    """Bytes of one element of each operand, and of the output."""
    return tuple(dtype.itemsize for dtype in spec.input_dtypes), spec.output_dtype.itemsize
