# SPDX-License-Identifier: Apache-2.0
"""Contributions whose reduction tells which additions were done, and in which order: for ``verify`` and ``probe``.

Plain random numbers hide most differences of order, above all 16-bit ones that are summed in float32. Here each element
(one number on every rank) is of one of these kinds:

    near        exponents within the precision of one another: nearly every addition rounds
    cancelling  +big and -big on two ranks, the others about half a unit in the last place of big: what is added
                before -big arrives is lost, so the result tells when it arrived
    ladder      big, e, e/2, e/2, ... from some rank on, e half a unit of big
    wide        any finite number; products overflow and underflow on the way
    special     NaNs of several kinds, infinities, zeros of both signs, numbers at the edges of the format

A number is a pure function of seed, rank, element, world size and type, through splitmix64 (Steele, Lea, Flood 2014):
any rank can make any other's contribution, and the digest of a result is the same wherever it was computed.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from detcomm.collectives import DType
from detcomm.transports.base import Bytes

Words = NDArray[np.uint64]
Numbers = NDArray[np.int64]

_EXPONENT_BITS = {DType.FLOAT32: 8, DType.FLOAT64: 11, DType.BFLOAT16: 8, DType.FLOAT16: 5}
_ACCUMULATOR_FRACTION_BITS = {DType.FLOAT64: 52}
"""Fraction bits of the type in which sums are kept; 23, those of float32, for all others."""

_NEAR, _CANCELLING, _LADDER, _WIDE, _SPECIAL = range(5)
_SHARES = (_NEAR,) * 4 + (_CANCELLING,) * 5 + (_LADDER,) * 3 + (_WIDE,) * 3 + (_SPECIAL,)

_FACTORS = (0.1, 0.1, -0.5, 0.1, 0.1, 3.0, 0.1, 1 / 3)
"""Most are equal, so that what cancels still does after the multiplication."""


def contribution(dtype: DType, count: int, rank: int, world_size: int, seed: int = 0) -> Bytes:
    """What ``rank`` contributes: ``count`` elements, as bytes."""
    if dtype.kind == "complex":
        return contribution(dtype.real, 2 * count, rank, world_size, seed)
    if dtype.is_float:
        return _floats(dtype, count, rank, world_size, seed, finite=False).view(np.uint8)
    if dtype is DType.BOOL:
        threshold = np.array([1, 8, 15])[_below(_stream(count, seed, 5), 3)]
        return (_below(_stream(count, seed, 6, rank), 16) < threshold).view(np.uint8)
    return _integers(dtype, count, rank, seed).view(np.uint8)


def near_contribution(dtype: DType, count: int, rank: int, world_size: int, seed: int = 0) -> Bytes:
    """Numbers of the kind *near* alone: their sums are finite in any order of additions."""
    return _floats(dtype, count, rank, world_size, seed, finite=True).view(np.uint8)


def factor(rank: int) -> float:
    """The factor of ``rank`` in a PREMUL_SUM: inexact and exact ones, one of them negative."""
    return _FACTORS[rank % len(_FACTORS)]


def _splitmix(words: Words) -> Words:
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _stream(count: int, *keys: int) -> Words:
    """``count`` random words named by ``keys``; a shorter stream is the beginning of a longer one."""
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = _splitmix(state ^ np.uint64(key))
    return _splitmix(state + np.arange(count, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95))


def _below(words: Words, bound: int) -> Numbers:
    """Numbers from 0 to ``bound`` - 1, from the high bits."""
    return ((words >> np.uint64(33)) % np.uint64(bound)).astype(np.int64)


def _floats(dtype: DType, count: int, rank: int, world_size: int, seed: int, *, finite: bool) -> NDArray[Any]:
    exponent_bits = _EXPONENT_BITS[dtype]
    fraction_bits = 8 * dtype.itemsize - 1 - exponent_bits
    accumulator_bits = _ACCUMULATOR_FRACTION_BITS.get(dtype, 23)
    top = (1 << exponent_bits) - 2  # the biased exponent of the largest finite numbers
    shared = [_stream(count, seed, 1, key) for key in range(4)]  # alike on all ranks
    own = [_stream(count, seed, 2, rank, key) for key in range(3)]
    kind = np.array(_SHARES)[_below(shared[0], len(_SHARES))] if not finite else np.full(count, _NEAR)
    # The last place of the accumulator in one half of the elements, of the type itself in the other.
    precision = np.where(shared[1] & np.uint64(1), accumulator_bits, fraction_bits)
    headroom = (world_size - 1).bit_length() + 1
    centre = top - headroom - _below(shared[1], max(1, top - accumulator_bits - headroom - 3))
    place = (rank + _below(shared[2], world_size)) % world_size
    partner = 1 + _below(shared[3], max(1, world_size - 1))

    fraction_mask = np.uint64((1 << fraction_bits) - 1)
    sign = _below(own[0], 2)
    fraction = (own[1] & fraction_mask).astype(np.int64)
    exponent = 1 + _below(own[2], top)  # wide

    exponent = np.where(kind == _NEAR, centre - _below(own[2], 1 << 16) % (precision + 2), exponent)

    pair = (kind == _CANCELLING) & ((place == 0) | (place == partner)) & (world_size > 1)
    exponent = np.where(kind == _CANCELLING, centre - precision - 2 + _below(own[2], 4), exponent)
    exponent = np.where(pair, centre, exponent)
    fraction = np.where(pair, (shared[3] & fraction_mask).astype(np.int64), fraction)
    sign = np.where(pair, (place == 0).astype(np.int64), sign)

    ladder = kind == _LADDER
    exponent = np.where(ladder, centre - np.where(place == 0, 0, precision + np.minimum(place, 2)), exponent)
    fraction = np.where(ladder, 0, fraction)
    sign = np.where(ladder, 0, sign)

    exponent = np.clip(exponent, 0, top).astype(np.uint64)
    word = (sign.astype(np.uint64) << np.uint64(exponent_bits + fraction_bits)) | (exponent << np.uint64(fraction_bits))
    word |= fraction.astype(np.uint64)
    patterns = _special_patterns(exponent_bits, fraction_bits)
    word = np.where(kind == _SPECIAL, patterns[_below(own[0], len(patterns))], word)
    return word.astype(f"uint{8 * dtype.itemsize}")


def _special_patterns(exponent_bits: int, fraction_bits: int) -> Words:
    infinity = ((1 << exponent_bits) - 1) << fraction_bits
    magnitudes = [
        0,
        1,  # smallest subnormal
        (1 << fraction_bits) - 1,  # largest subnormal
        1 << fraction_bits,  # smallest normal
        infinity - 1,  # largest finite
        infinity,
        infinity | (1 << (fraction_bits - 1)) | 5,  # quiet NaN with a payload
        infinity | 3,  # signalling NaN
        ((1 << (exponent_bits - 1)) - 1) << fraction_bits,  # one
    ]
    sign = 1 << (exponent_bits + fraction_bits)
    return np.array(magnitudes + [sign | magnitude for magnitude in magnitudes], np.uint64)


def _integers(dtype: DType, count: int, rank: int, seed: int) -> NDArray[Any]:
    """Any words, small numbers of both signs, and the edges of the type: sums and products wrap."""
    kind = _below(_stream(count, seed, 3), 4)
    words = _stream(count, seed, 4, rank)
    info = np.iinfo(dtype.value)
    mask = (1 << info.bits) - 1
    edges = np.array([edge & mask for edge in (info.min, info.max, 0, 1, info.max // 2, info.max - 1)], np.uint64)
    small = words >> np.uint64(61)
    small = np.where(words & np.uint64(1), small, np.uint64(0) - small)
    word = np.where(kind == 0, edges[_below(words, len(edges))], np.where(kind == 1, small, words))
    return word.astype(f"uint{info.bits}")
