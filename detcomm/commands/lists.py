# SPDX-License-Identifier: Apache-2.0
"""Options that take several values, separated by commas: ``--dtypes float32,bfloat16``."""

from collections.abc import Mapping
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


def known_values(text: str, known: Mapping[str, T], option: str) -> list[T]:
    """Values by their names, each once.

    Raises:
        UsageError: naming ``option`` and the part that is none, or an empty list.
    """
    for part in split(text):
        if part not in known:
            raise UsageError(f"{option}: expected among {', '.join(known)}, got {part!r}")
    return list(_not_empty(tuple(dict.fromkeys(known[part] for part in split(text))), option))


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def to_bytes(text: str, option: str) -> list[int]:
    """Numbers of bytes: ``4K,1M,65536``.

    Raises:
        UsageError: naming ``option`` and the part that is none, or an empty list.
    """
    sizes = []
    for part in split(text):
        unit = part[-1:].upper() if part[-1:].upper() in _UNITS and not part[-1:].isdigit() else ""
        number = part[: len(part) - len(unit)]
        if not (number.isascii() and number.isdigit()):
            raise UsageError(f"{option}: expected bytes such as 4K, 1M or 65536, got {part!r}")
        sizes.append(int(number) * _UNITS[unit])
    return list(_not_empty(tuple(sizes), option))
