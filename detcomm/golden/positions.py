# SPDX-License-Identifier: Apache-2.0
"""Where the elements of a part lie in the whole: what makes the digests of parts add up to that of the whole.

A place maps the flat index of an element in the part (in row-major order) to its flat index in the whole. The maps are
written with operators that NumPy arrays and torch tensors of int64 share. Must not know how elements are hashed.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from detcomm.errors import UsageError

Axis = range | NDArray[np.int64]
"""The indices of a part along one dimension of the whole: a run of step 1, or any."""


class Place(Protocol):
    """Where a part lies."""

    def at(self, local: Any) -> Any:
        """Indices in the whole of these indices in the part; an int64 array or tensor like ``local``."""

    @property
    def text(self) -> str:
        """Equal for equal places: how ranks know that they hold the same part."""


@attrs.frozen
class Run:
    """A contiguous run that begins at element ``offset`` of the whole."""

    offset: int = attrs.field(default=0)

    @offset.validator
    def _check(self, _: Any, offset: Any) -> None:
        if not isinstance(offset, int) or isinstance(offset, bool) or not 0 <= offset < 1 << 62:
            raise UsageError(f"offset: expected a whole number in [0, 2**62), got {offset!r}")

    def at(self, local: Any) -> Any:
        return local + self.offset

    @property
    def text(self) -> str:
        return str(self.offset)


@attrs.frozen(eq=False)
class Grid:
    """A part that is cut out dimension by dimension, as shards are.

    Args:
        axes: for each dimension of the whole, the indices there that the part has.
        shape: of the whole.
    """

    axes: tuple[Axis, ...]
    shape: tuple[int, ...]

    def __attrs_post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise UsageError(f"a grid in {len(self.shape)} dimensions has {len(self.axes)} axes")
        for axis, size in zip(self.axes, self.shape, strict=True):
            if isinstance(axis, range) and axis.step != 1:
                raise UsageError(f"an axis of a grid: expected a range of step 1 or an array, got {axis}")
            lowest, highest = (axis[0], axis[-1]) if isinstance(axis, range) and axis else _extent(axis)
            if lowest < 0 or highest >= max(1, size):
                raise UsageError(f"an axis of a grid: expected indices in [0, {size}), got {lowest} to {highest}")

    def at(self, local: Any) -> Any:
        index, stride = local * 0, 1
        for axis, size in zip(reversed(self.axes), reversed(self.shape), strict=True):
            coordinate = local % max(1, len(axis))
            local = local // max(1, len(axis))
            along = coordinate + axis.start if isinstance(axis, range) else _take(axis, coordinate)
            index = index + along * stride
            stride *= size
        return index

    @property
    def text(self) -> str:
        axes = [f"{a.start}:{a.stop}" if isinstance(a, range) else _fingerprint(a) for a in self.axes]
        return f"{'x'.join(map(str, self.shape))}[{','.join(axes)}]"

    @property
    def size(self) -> int:
        """Elements of the part."""
        return math.prod(len(axis) for axis in self.axes)

    def simplified(self) -> "Grid | Run":
        """The same place as a run, where it is one: cheaper to compute."""
        if not all(isinstance(axis, range) for axis in self.axes):
            return self
        if not self.axes:
            return Run(0)
        if all(len(axis) == size for axis, size in zip(self.axes[1:], self.shape[1:], strict=True)):
            return Run(self.axes[0][0] * math.prod(self.shape[1:]) if self.size else 0)
        return self


@attrs.frozen(eq=False)
class Scattered:
    """Any elements: ``indices[i]`` is the place of element i. A flat int64 array, or a tensor on the values' device."""

    indices: Any

    def at(self, local: Any) -> Any:
        return _take(self.indices, local)

    @property
    def text(self) -> str:
        return _fingerprint(self.indices)


def place_of(offset: int, indices: Any, shape: Sequence[int]) -> Place:
    """The place that a caller names.

    Args:
        offset: of the first element, if ``indices`` is ``None``.
        indices: a place, or the index in the whole of each element: an array or tensor of integers of ``shape``.
        shape: of the part.

    Raises:
        UsageError: both are given, or they do not fit the part.
    """
    if indices is None:
        return Run(offset)
    if offset != 0:
        raise UsageError("give offset or indices, not both")
    if isinstance(indices, Run):
        return indices
    if isinstance(indices, Grid):
        if indices.size != math.prod(shape):
            raise UsageError(f"indices: a grid of {indices.size} elements for a part of shape {tuple(shape)}")
        return indices.simplified()
    if tuple(indices.shape) != tuple(shape):
        raise UsageError(f"indices: expected shape {tuple(shape)} as the values, got {tuple(indices.shape)}")
    flat = indices.reshape(-1)
    flat = flat.astype(np.int64) if isinstance(flat, np.ndarray) else flat.long()
    if len(flat) and int(flat.min()) < 0:
        raise UsageError(f"indices: expected none below zero, got {int(flat.min())}")
    return Scattered(flat)


def _extent(axis: Any) -> tuple[int, int]:
    return (int(axis.min()), int(axis.max())) if len(axis) else (0, 0)


def _take(indices: Any, local: Any) -> Any:
    if isinstance(local, np.ndarray):
        return np.asarray(indices)[local]
    if isinstance(indices, np.ndarray):
        return local.new_tensor(indices)[local]
    return indices.to(local.device)[local]


def _fingerprint(indices: Any) -> str:
    flat = indices if isinstance(indices, np.ndarray) else indices.cpu().numpy()
    return hashlib.blake2b(flat.astype("<i8").tobytes(), digest_size=16).hexdigest()
