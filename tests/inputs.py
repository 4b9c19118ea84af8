# SPDX-License-Identifier: Apache-2.0
"""Contributions that can fail: inputs whose reduction shows which additions were done, and in which order.

Plain random numbers hide most differences of order, above all 16-bit ones that are summed in float32. Here each
element ("column", one number per rank) is of one of these kinds:

    near        exponents within the precision of one another: nearly every addition rounds
    cancelling  +big and -big on two ranks, the others about half a unit in the last place of big: what is added
                before -big arrives is lost, so the result tells when it arrived
    ladder      big, e, e/2, e/2, ... in some rotation, e half a unit of big
    wide        any finite number; products overflow and underflow on the way
    special     NaNs with payloads, signalling and negative ones, infinities, zeros of both signs, extremes
    subnormal   at and below the smallest normal number
    overflow    near the largest finite number

Every number is a pure function of (seed, rank, element, world size, type) through splitmix64, so that any process
can make any rank's input and files made from it never change. Knows nothing of detcomm.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.oracle import REAL_PART, storage

Array = NDArray[Any]
Words = NDArray[np.uint64]

FLOATS = ("float32", "float64", "bfloat16", "float16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
COMPLEX = ("complex64", "complex128")
DTYPES = (*FLOATS, *INTEGERS, "bool", *COMPLEX)

PERIOD = 10007
"""Long inputs repeat after this many elements: a prime, so no chunk or shard boundary is a multiple of it."""

# (exponent bits, fraction bits, fraction bits of the accumulator)
_FORMATS = {"float32": (8, 23, 23), "float64": (11, 52, 52), "bfloat16": (8, 7, 23), "float16": (5, 10, 23)}

_FLOAT_OPS = ("sum", "avg", "product", "min", "max", "premul_sum")
_INTEGER_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")


def legal_ops(dtype: str) -> tuple[str, ...]:
    """The operations that ``docs/numerics.md`` specifies on this type."""
    if dtype in FLOATS:
        return _FLOAT_OPS
    if dtype in COMPLEX:
        return ("sum", "avg", "premul_sum")
    return tuple(op for op in _INTEGER_OPS if not (dtype == "bool" and op == "avg"))


def make(dtype: str, count: int, world_size: int, seed: int = 0) -> list[Array]:
    """The contributions of all ranks, each an array of ``count`` elements of the storage type."""
    return [rank_input(dtype, count, rank, world_size, seed) for rank in range(world_size)]


def rank_input(dtype: str, count: int, rank: int, world_size: int, seed: int = 0) -> Array:
    """The contribution of one rank."""
    if dtype in REAL_PART:
        return rank_input(REAL_PART[dtype], 2 * count, rank, world_size, seed).view(dtype)
    period = min(count, PERIOD)
    if dtype in FLOATS:
        block = _floats(dtype, period, rank, world_size, seed)
    elif dtype == "bool":
        block = _bools(period, rank, seed)
    else:
        block = _integers(dtype, period, rank, seed)
    return np.resize(block, count) if count > period else block


def factors(world_size: int) -> list[float]:
    """Each rank's own factor for PREMUL_SUM: exact ones, inexact ones, negative ones, zero."""
    pattern = [0.1, -0.5, 3.0, 1 / 3, 1.0, -1e-3, 7e4, 0.0]
    return [pattern[rank % len(pattern)] for rank in range(world_size)]


def bits(array: Array) -> NDArray[np.uint8]:
    """The memory of an array, to compare."""
    return np.ascontiguousarray(array).view(np.uint8)


def specials(dtype: str) -> list[int]:
    """The bit patterns that a fold may treat in a wrong way."""
    exponent_bits, fraction_bits, _ = _FORMATS[dtype]
    sign = 1 << (exponent_bits + fraction_bits)
    infinity = ((1 << exponent_bits) - 1) << fraction_bits
    quiet = 1 << (fraction_bits - 1)
    magnitudes = [
        0,
        1,  # smallest subnormal
        (1 << fraction_bits) - 1,  # largest subnormal
        1 << fraction_bits,  # smallest normal
        infinity - 1,  # largest finite
        infinity,
        infinity | quiet,  # canonical NaN
        infinity | quiet | 5,  # quiet NaN with a payload
        infinity | 3,  # signalling NaN
        ((1 << (exponent_bits - 1)) - 1) << fraction_bits,  # one
    ]
    return magnitudes + [sign | magnitude for magnitude in magnitudes]


def _splitmix(words: Words) -> Words:
    """The output function of splitmix64 (Steele, Lea, Flood 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _stream(count: int, *keys: int) -> Words:
    """``count`` random words named by ``keys``."""
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = _splitmix(state ^ np.uint64(key % (1 << 64)))
    return _splitmix(state + np.arange(count, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95))


def _below(words: Words, bound: int) -> NDArray[np.int64]:
    """Numbers from 0 to ``bound`` - 1, from the high bits."""
    return ((words >> np.uint64(33)) % np.uint64(bound)).astype(np.int64)


def _floats(dtype: str, count: int, rank: int, world_size: int, seed: int) -> Array:
    exponent_bits, fraction_bits, accumulator_bits = _FORMATS[dtype]
    top = (1 << exponent_bits) - 2  # biased exponent of the largest finite numbers
    shared = [_stream(count, seed, 1, key) for key in range(4)]  # alike on all ranks
    own = [_stream(count, seed, 2, rank, key) for key in range(3)]
    kind = _below(shared[0], 16)
    # Whose last place the column aims at: the accumulator's, or the type's own (which `wire` rounds to).
    precision = np.where(shared[1] & np.uint64(1), accumulator_bits, fraction_bits)
    centre = top - 1 - _below(shared[1], max(1, top - accumulator_bits - 4))
    place = (rank + _below(shared[2], world_size)) % world_size
    backwards = (shared[2] & np.uint64(1)).astype(bool)
    place = np.where(backwards, world_size - 1 - place, place)
    partner = 1 + _below(shared[3], max(1, world_size - 1))

    sign = _below(own[0], 2)
    fraction = (own[1] & np.uint64((1 << fraction_bits) - 1)).astype(np.int64)
    exponent = 1 + _below(own[2], top)  # wide

    near = kind <= 3
    exponent = np.where(near, centre - _below(own[2], 1 << 16) % (precision + 2), exponent)

    cancelling = (kind >= 4) & (kind <= 8)
    shared_fraction = (shared[3] & np.uint64((1 << fraction_bits) - 1)).astype(np.int64)
    pair = cancelling & ((place == 0) | (place == partner)) & (world_size > 1)
    exponent = np.where(cancelling, centre - precision - 2 + _below(own[2], 4), exponent)
    exponent = np.where(pair, centre, exponent)
    fraction = np.where(pair, shared_fraction, fraction)
    sign = np.where(pair, (place == 0).astype(np.int64), sign)

    ladder = (kind >= 9) & (kind <= 11)
    rung = np.where(place == 0, 0, precision + np.minimum(place, 2))
    exponent = np.where(ladder, centre - rung, exponent)
    fraction = np.where(ladder, 0, fraction)
    sign = np.where(ladder, 0, sign)

    exponent = np.where(kind == 14, _below(own[2], 3), exponent)  # subnormal
    exponent = np.where(kind == 15, top, exponent)  # overflow

    exponent = np.clip(exponent, 0, top)
    unsigned = np.dtype(f"uint{1 + exponent_bits + fraction_bits}")
    word = (sign.astype(np.uint64) << np.uint64(exponent_bits + fraction_bits)) | (
        exponent.astype(np.uint64) << np.uint64(fraction_bits)
    )
    word |= fraction.astype(np.uint64)
    patterns = np.array(specials(dtype), np.uint64)
    word = np.where(kind == 13, patterns[_below(own[0], len(patterns))], word)
    return np.asarray(word.astype(unsigned).view(storage(dtype)))


def _integers(dtype: str, count: int, rank: int, seed: int) -> Array:
    kind = _below(_stream(count, seed, 3), 4)
    words = _stream(count, seed, 4, rank)
    info = np.iinfo(dtype)
    edges: Sequence[int] = [
        info.min,
        info.max,
        0,
        1,
        info.max // 2,
        info.min // 2 - 1 if info.min else info.max - 1,
    ]
    mask = (1 << info.bits) - 1
    patterns = np.array([edge & mask for edge in edges], np.uint64)
    small = words >> np.uint64(61)  # 0..7
    small = np.where(words & np.uint64(1), small, np.uint64(0) - small)  # negative, or large where unsigned
    word = np.where(kind == 0, patterns[_below(words, len(edges))], np.where(kind == 1, small, words))
    return np.asarray(word.astype(f"uint{info.bits}").view(dtype))


def _bools(count: int, rank: int, seed: int) -> Array:
    """Columns that are mostly true, mostly false, or mixed: each of and, or, xor has both results."""
    threshold = np.array([1, 8, 15])[_below(_stream(count, seed, 5), 3)]
    return np.asarray(_below(_stream(count, seed, 6, rank), 16) < threshold)
