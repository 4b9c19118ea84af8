# SPDX-License-Identifier: Apache-2.0
"""Options that take several values, separated by commas: ``--dtypes float32,bfloat16``."""

from typing import TypeVar

from detcomm.collectives import DType, ReduceOp
from detcomm.errors import UsageError

T = TypeVar("T")


def split(text: str) -> list[str]:
    """The parts of a list."""
    return [part for part in text.replace(" ", "").split(",") if part]


def to_counts(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers of elements.

    Raises:
        UsageError: naming ``option`` and the part that is none, or an empty list.
    """
    for part in split(text):
        if not (part.isascii() and part.isdigit()):
            raise UsageError(f"{option}: expected whole numbers, got {part!r}")
    return _not_empty(tuple(int(part) for part in split(text)), option)


def to_dtypes(text: str, option: str) -> tuple[DType, ...]:
    """Element types.

    Raises:
        UsageError: naming ``option`` and the part that is none, or an empty list.
    """
    known = {dtype.value: dtype for dtype in DType}
    return _not_empty(tuple(known[_known(part, known, option)] for part in split(text)), option)


def to_ops(text: str, option: str) -> tuple[ReduceOp, ...]:
    """Reduction operations.

    Raises:
        UsageError: naming ``option`` and the part that is none, or an empty list.
    """
    known = {op.value: op for op in ReduceOp}
    return _not_empty(tuple(known[_known(part, known, option)] for part in split(text)), option)


def _known(part: str, known: dict[str, DType] | dict[str, ReduceOp], option: str) -> str:
    if part not in known:
        raise UsageError(f"{option}: expected among {', '.join(known)}, got {part!r}")
    return part


def _not_empty(values: tuple[T, ...], option: str) -> tuple[T, ...]:
    if not values:
        raise UsageError(f"{option}: expected at least one value")
    return values
