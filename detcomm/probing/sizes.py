# SPDX-License-Identifier: Apache-2.0
"""The experiment: for each pair of ranks, the size of the smallest subtree that holds both, at every element.

    rank a gives M, rank b gives -M, every other rank gives u, with M so large that M + u = M

All units that meet M or -M before these two meet are lost; the units outside of the smallest subtree that holds both
survive and are counted by the result: size = N - result / u. M and u are such that this is exact in the type itself
and in float32 alike, so it does not matter where a library rounds. One reduction does all elements at once.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.probing.tree import Pair
from detcomm.reducers import Reducer
from detcomm.transports.base import Bytes

MAX_WORLD_SIZE = 64
"""N (N-1) / 2 reductions are needed; and 64 units must still be exact in bfloat16."""

_MAGNITUDES = {
    DType.FLOAT16: (2.0**15, 2.0**-24),
    DType.BFLOAT16: (2.0**60, 1.0),
    DType.FLOAT32: (2.0**60, 1.0),
    DType.FLOAT64: (2.0**200, 1.0),
}
"""M and u of each type."""

DTYPES = tuple(_MAGNITUDES)

NO_SIZE = -1
"""In place of a size: the result is no whole number of units, or one that no tree gives."""


@dataclass(frozen=True, eq=False)
class Sizes:
    """What one rank measured at the elements that it holds.

    Attributes:
        start, stop: the elements that this rank holds.
        run_starts: where runs of elements with equal sizes begin.
        table: for each pair (row) and run (column) the size.
        digest: of all results, to compare ranks that hold the same elements.
    """

    start: int
    stop: int
    pairs: tuple[Pair, ...]
    run_starts: NDArray[np.int64]
    table: NDArray[np.int16]
    digest: bytes

    def runs(self) -> Iterator[tuple[int, int, dict[Pair, int]]]:
        """Start, stop and sizes of each run."""
        stops = [*self.run_starts[1:].tolist(), self.stop]
        for index, (start, stop) in enumerate(zip(self.run_starts.tolist(), stops, strict=True)):
            yield start, stop, dict(zip(self.pairs, self.table[:, index].tolist(), strict=True))


def held_elements(collective: Collective, count: int, rank: int, world_size: int, root: int) -> tuple[int, int]:
    """Start and stop of the elements whose results ``rank`` receives."""
    if collective is Collective.REDUCE_SCATTER:
        shard = count // world_size
        return rank * shard, (rank + 1) * shard
    if collective is Collective.REDUCE and rank != root:
        return 0, 0
    return 0, count


def measure(
    reducer: Reducer,
    collective: Collective,
    dtype: DType,
    count: int,
    root: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> Sizes:
    """Do the experiment. Every rank of the group calls this.

    Args:
        advance: called after each pair of ranks.
    """
    rank, world_size = reducer.rank, reducer.world_size
    start, stop = held_elements(collective, count, rank, world_size, root)
    pairs = tuple(combinations(range(world_size), 2))
    big, unit = _MAGNITUDES[dtype]
    constants = {value: np.resize(_encode(value, dtype), count * dtype.itemsize) for value in (big, -big, unit)}
    digest = hashlib.blake2b(digest_size=16)
    changes = np.zeros(max(stop - start, 1), np.bool_)
    compressed: list[tuple[NDArray[np.int64], NDArray[np.int16]]] = []
    for low, high in pairs:
        given = constants[big if rank == low else -big if rank == high else unit]
        result = reducer.reduce(collective, ReduceOp.SUM, dtype, given, root=root)
        digest.update(result.tobytes())
        sizes = _sizes(result, dtype, unit, world_size)
        edges = np.flatnonzero(np.diff(sizes, prepend=NO_SIZE - 1)).astype(np.int64)
        changes[edges] = True
        compressed.append((edges, sizes[edges]))
        advance()
    run_starts = np.flatnonzero(changes[: stop - start]).astype(np.int64)
    table = np.empty((len(pairs), len(run_starts)), np.int16)
    for row, (edges, values) in enumerate(compressed):
        table[row] = values[np.searchsorted(edges, run_starts, side="right") - 1]
    return Sizes(start, stop, pairs, run_starts + start, table, digest.digest())


def _sizes(result: Bytes, dtype: DType, unit: float, world_size: int) -> NDArray[np.int16]:
    with np.errstate(all="ignore"):
        units = decode(result, dtype) / unit
        plausible = (units >= 0) & (units <= world_size - 2) & (units == np.floor(units))
    return np.where(plausible, world_size - np.where(plausible, units, 0), NO_SIZE).astype(np.int16)


def _encode(value: float, dtype: DType) -> Bytes:
    if dtype is DType.BFLOAT16:  # exact: the upper half of the float32
        return np.frombuffer(np.float32(value).tobytes()[2:], np.uint8)
    return np.frombuffer(np.dtype(dtype.value).type(value).tobytes(), np.uint8)


def decode(data: Bytes, dtype: DType) -> NDArray[np.float64]:
    """The numbers that these bytes are, exactly."""
    if dtype is DType.BFLOAT16:
        wide: NDArray[np.uint32] = data.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).astype(np.float64)
    stored: NDArray[Any] = data.view(dtype.value)
    return stored.astype(np.float64)
