# SPDX-License-Identifier: Apache-2.0
"""Two sets of contributions with known results: exact ones, which tell whether a result is right, and hard ones.

Hard ones tell in which order they were added, since nearly every addition rounds.

Both repeat with a short period, so that the result of a message of any size is known after one period has been added.
The period is odd: it meets the positions at which libraries change their order in other ways each time.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from detcomm.association import Association
from detcomm.bench.cases import Case
from detcomm.collectives import Accumulate, Collective, DType, ReduceOp
from detcomm.contributions import contribution, near_contribution
from detcomm.transports.base import Bytes
from detcomm.verification.reference import expected_bits

_PERIOD = 2053
_CHUNK_ELEMS = 1 << 20
"""Elements looked up at once, to bound the memory of indices."""


def exact_input(case: Case, rank: int, world_size: int) -> Bytes:
    """Small whole numbers, whose sums and products are exact in every type and so right in any order."""
    count = case.given(world_size)
    return _repeat(_encode(case.dtype, _whole(case, rank, world_size)), case.dtype, 0, count)


def exact_result(case: Case, rank: int, world_size: int) -> Bytes:
    """What ``rank`` must receive of them; computed in wider numbers, without detcomm's folds."""
    numbers = [_whole(case, peer, world_size) for peer in range(world_size)]
    if case.collective is Collective.ALL_GATHER:
        given = case.given(world_size)
        return np.concatenate([_repeat(_encode(case.dtype, own), case.dtype, 0, given) for own in numbers])
    stacked = np.stack(numbers)
    if case.op is ReduceOp.PRODUCT:
        result = stacked.prod(axis=0)
    elif case.op is ReduceOp.MIN:
        result = stacked.min(axis=0)
    elif case.op is ReduceOp.MAX:
        result = stacked.max(axis=0)
    else:
        result = stacked.sum(axis=0)
    if case.op is ReduceOp.AVG and case.dtype.kind in ("int", "uint"):
        result = result // world_size
    elif case.op is ReduceOp.AVG:
        result = result / world_size
    return _repeat(_encode(case.dtype, result), case.dtype, *_range(case, rank, world_size))


def num_wrong(case: Case, result: Bytes, expected: Bytes, world_size: int) -> int:
    """Elements of an exact result that are not as expected; of an average, by more than the roundings on its way.

    A library may divide the contributions in place of the sum, which is right but for the last places.
    """
    if case.op is not ReduceOp.AVG or not case.dtype.is_float or not case.collective.reduces:
        return differing_elements(result, expected, case.dtype)
    got, wanted = (decode(case.dtype, data) for data in (result, expected))
    epsilon = 2.0 ** -{DType.BFLOAT16: 8, DType.FLOAT16: 11, DType.FLOAT32: 24, DType.FLOAT64: 53}[case.dtype]
    with np.errstate(invalid="ignore"):
        within = np.abs(got - wanted) <= 2 * (world_size + 1) * epsilon * np.abs(wanted)
    return int(np.count_nonzero(~within))


def hard_input(case: Case, rank: int, world_size: int) -> Bytes:
    """Numbers of which nearly every addition rounds; a rank's own numbers, whatever the size of the message."""
    return _repeat(_hard(case.dtype, case.op, rank, world_size), case.dtype, 0, case.given(world_size))


def hard_result(case: Case, rank: int, world_size: int, association: Association, accumulate: Accumulate) -> Bytes:
    """The specified bits of what ``rank`` receives of them."""
    if case.collective is Collective.ALL_GATHER:
        given = case.given(world_size)
        periods = [_hard(case.dtype, case.op, peer, world_size) for peer in range(world_size)]
        return np.concatenate([_repeat(own, case.dtype, 0, given) for own in periods])
    start, stop = _range(case, rank, world_size)
    if association.name != "ring":
        whole = _hard_period(case.dtype, case.op, world_size, association, accumulate, 0)
        return _repeat(whole, case.dtype, start, stop)
    itemsize = case.dtype.itemsize
    by_class = [
        _hard_period(case.dtype, case.op, world_size, association, accumulate, owner).reshape(-1, itemsize)
        for owner in range(world_size)
    ]
    table = np.stack(by_class)
    parts: list[Bytes] = []
    for first in range(start, stop, _CHUNK_ELEMS):
        positions = np.arange(first, min(first + _CHUNK_ELEMS, stop))
        owners = positions // association.ring_chunk_elems % world_size
        if case.collective is Collective.REDUCE_SCATTER:
            owners = np.full_like(positions, rank)
        parts.append(table[owners, positions % _PERIOD].reshape(-1))
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def differing_elements(left: Bytes, right: Bytes, dtype: DType) -> int:
    """How many elements have other bits."""
    if left.size != right.size:
        return max(left.size, right.size) // dtype.itemsize
    words = left.reshape(-1, dtype.itemsize) != right.reshape(-1, dtype.itemsize)
    return int(np.count_nonzero(words.any(axis=1)))


def _range(case: Case, rank: int, world_size: int) -> tuple[int, int]:
    """The elements of the message that ``rank`` receives."""
    received = case.received(world_size)
    start = rank * received if case.collective is Collective.REDUCE_SCATTER else 0
    return start, start + received


def _repeat(period: Bytes, dtype: DType, start: int, stop: int) -> Bytes:
    """Elements ``start`` to ``stop`` of the period without end."""
    shifted = np.roll(period, -(start % _PERIOD) * dtype.itemsize)
    return np.resize(shifted, (stop - start) * dtype.itemsize) if stop > start else np.empty(0, np.uint8)


def _whole(case: Case, rank: int, world_size: int) -> NDArray[np.int64]:
    """One period of whole numbers, whose reductions stay below 2^7, and so are exact in every type that is met."""
    positions = np.arange(_PERIOD)
    rare = (positions + rank) % max(7, -(-world_size // 4)) == 0  # on few ranks at a time
    if case.dtype is DType.BOOL:
        return np.where(rare, 0, 1) if case.op in (ReduceOp.PRODUCT, ReduceOp.MIN) else np.where(rare, 1, 0)
    if case.op is ReduceOp.PRODUCT:
        return np.where(rare, 2, 1)
    largest = max(1, min(6, 126 // world_size))
    numbers = (positions * 5 + rank * 3) % (largest + 1)
    return numbers if rank < 126 else np.zeros_like(numbers)


@lru_cache(maxsize=256)
def _hard(dtype: DType, op: ReduceOp, rank: int, world_size: int) -> Bytes:
    finite = dtype.is_float and op is not ReduceOp.PRODUCT
    make = near_contribution if finite else contribution
    return make(dtype, _PERIOD, rank, world_size)


@lru_cache(maxsize=256)
def _hard_period(
    dtype: DType, op: ReduceOp, world_size: int, association: Association, accumulate: Accumulate, element_class: int
) -> Bytes:
    inputs = [_hard(dtype, op, rank, world_size) for rank in range(world_size)]
    if association.name == "ring":  # one class for all elements: its own order of ranks, in a linear fold
        order = association.leaf_order(world_size, element_class)
        inputs, association = [inputs[rank] for rank in order], Association("linear")
    return expected_bits(association, accumulate, op, dtype, inputs, ())


def _encode(dtype: DType, numbers: "NDArray[np.int64] | NDArray[np.float64]") -> Bytes:
    if dtype is DType.BFLOAT16:
        word: NDArray[np.uint32] = numbers.astype(np.float32).view(np.uint32)
        word = word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))  # to nearest even
        half: Bytes = (word >> np.uint32(16)).astype(np.uint16).view(np.uint8)
        return half
    if dtype is DType.BOOL:
        flags: Bytes = (numbers != 0).view(np.uint8)
        return flags
    stored: Bytes = numbers.astype(dtype.value).view(np.uint8)
    return stored


def decode(dtype: DType, data: Bytes) -> NDArray[np.float64]:
    """The numbers that these bytes are, as float64."""
    if dtype is DType.BFLOAT16:
        wide: NDArray[np.uint32] = data.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).astype(np.float64)
    stored: NDArray[np.float64] = data.view(dtype.value).astype(np.float64)
    return stored
