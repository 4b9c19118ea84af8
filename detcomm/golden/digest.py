# SPDX-License-Identifier: Apache-2.0
"""The digest of a tensor's bits: position-keyed and mergeable, so that parts add up to the whole in any order.

    digest(whole) == digest(part, offset=0) + digest(other_part, offset=part.size)

Two lanes of 64 bits. In each, an element at flat index i of the whole counts mix(mix(i + width * G) XOR bits), and the
lane is the sum over all elements modulo 2^64. Lane 0 mixes with the finaliser of splitmix64 (Steele, Lea, Flood: "Fast
splittable pseudorandom number generators", 2014, with the constants of Stafford's variant 13), lane 1 with that of
MurmurHash3 (Appleby, ``fmix64``). ``docs/golden.md`` is the specification, with a test vector.

Bits decide, not values: -0.0 is not 0.0, and each payload of a NaN counts. Two tensors that differ by accident have
equal digests with a probability of about 2^-128. This is no cryptographic hash: who wants a collision can make one.

Shape, type and name are not part of the digest; who keeps one keeps them beside it.
"""

import re
from typing import Any, Self

import attrs
import numpy as np
from numpy.typing import NDArray

from detcomm.errors import UnsupportedError, UsageError
from detcomm.golden.positions import Place, place_of

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: sets the widths of elements apart."""

MIXES: tuple[tuple[tuple[int, int, int], tuple[int, int]], ...] = (
    ((30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)),  # splitmix64
    ((33, 33, 33), (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)),  # MurmurHash3 fmix64
)
"""Of each lane: three shifts and two factors. z ^= z >> s0; z *= f0; z ^= z >> s1; z *= f1; z ^= z >> s2."""

_CHUNK_ELEMS = 1 << 15
"""Elements that are mixed at once: their temporaries stay in the cache."""

_TEXT = re.compile(r"[0-9a-f]{32}")


@attrs.frozen(order=True)
class Digest:
    """A digest of a set of elements; the sum of two is that of both sets.

    Attributes:
        lanes: the two sums, each in [0, 2^64).
    """

    lanes: tuple[int, int] = (0, 0)

    def __add__(self, other: "Digest | int") -> "Digest":
        if other == 0:  # the start of sum()
            return self
        if not isinstance(other, Digest):
            return NotImplemented
        return Digest(((self.lanes[0] + other.lanes[0]) & MASK, (self.lanes[1] + other.lanes[1]) & MASK))

    __radd__ = __add__

    def __str__(self) -> str:
        return f"{self.lanes[0]:016x}{self.lanes[1]:016x}"

    @classmethod
    def from_text(cls, text: str) -> Self:
        """From 32 hexadecimal digits, lane 0 first.

        Raises:
            UsageError: it is none.
        """
        if not isinstance(text, str) or not _TEXT.fullmatch(text):
            raise UsageError(f"digest: expected 32 hexadecimal digits, got {text!r}")
        return cls((int(text[:16], 16), int(text[16:], 16)))


def digest(values: Any, offset: int = 0, *, indices: Any = None) -> Digest:
    """The digest of an array or tensor, or of a part of one.

    A tensor on a GPU is hashed there. Needs a copy of what is not contiguous, otherwise a bounded amount of memory.

    Args:
        values: a NumPy array or a torch tensor of any type whose elements have 1, 2, 4 or 8 bytes, or of complex128.
            A DTensor is hashed as what it holds here, in its place: the digests of all shards add up.
        offset: index in the whole of the first element, in elements; for a part that is a contiguous run of it.
        indices: for any other part: ``Grid``, or an array or tensor of the values' shape with the flat index of each.

    Raises:
        UnsupportedError: objects, records, sparse or quantised tensors.
        UsageError: offset or indices do not fit.
    """
    if isinstance(values, np.ndarray | np.generic):
        array = np.asarray(values)
        return digest_of_array(array, place_of(offset, indices, array.shape))
    from detcomm.golden import tensors  # needs torch, which a command that compares files does without

    return tensors.digest_of_tensor(values, offset, indices)


def digest_of_array(array: NDArray[Any], place: Place) -> Digest:
    """The digest of a NumPy array whose elements lie at ``place``, in row-major order."""
    words, width = _words(array)
    per_element = max(1, width // 8)
    totals = [0, 0]
    for start in range(0, words.size, _CHUNK_ELEMS * per_element):
        chunk: NDArray[np.uint64] = words[start : start + _CHUNK_ELEMS * per_element].astype(np.uint64)
        local = np.arange(start // per_element, (start + chunk.size) // per_element, dtype=np.int64)
        index: NDArray[np.uint64] = np.asarray(place.at(local), dtype=np.int64).view(np.uint64)
        if per_element > 1:
            index = np.add.outer(index * np.uint64(per_element), np.arange(per_element, dtype=np.uint64)).reshape(-1)
        keyed = index + np.uint64(width * GAMMA & MASK)
        for lane in range(2):
            mixed = keyed.copy()
            _mix(mixed, lane)
            mixed ^= chunk
            _mix(mixed, lane)
            totals[lane] += int(mixed.sum(dtype=np.uint64))
    return Digest((totals[0] & MASK, totals[1] & MASK))


def _mix(z: NDArray[np.uint64], lane: int) -> None:
    shifts, factors = MIXES[lane]
    for shift, factor in zip(shifts, (*factors, 1), strict=True):
        z ^= z >> np.uint64(shift)
        if factor != 1:
            z *= np.uint64(factor)


def _words(array: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """The elements' bits as unsigned numbers, and the bytes of an element; complex128 has two words an element."""
    dtype = array.dtype
    complex128 = dtype.kind == "c" and dtype.itemsize == 16
    if dtype.hasobject or dtype.fields or dtype.subdtype or (dtype.itemsize not in (1, 2, 4, 8) and not complex128):
        raise UnsupportedError(f"digest: elements of {dtype} have no bits that are specified")
    if dtype.kind in "SUmM":
        raise UnsupportedError(f"digest: expected numbers, got {dtype}")
    flat = np.ascontiguousarray(array).reshape(-1)
    if not dtype.isnative:
        flat = flat.byteswap().view(dtype.newbyteorder("="))
    return flat.view(f"u{min(8, dtype.itemsize)}"), dtype.itemsize
