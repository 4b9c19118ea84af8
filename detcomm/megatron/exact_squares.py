# SPDX-License-Identifier: Apache-2.0
"""The exact sum of squares of tensors: an integer, so that no partition and no order can change it.

The square of a float32 is an integer multiple of 2^-298 below 2^256. The sum is kept as such an integer, without bound
(a superaccumulator, Kulisch 1971); it travels between ranks in int64 limbs, whose sums wrap nothing and have no order;
the square root is rounded once, at the end. Works on the bits of the elements: a thread that flushes subnormals to
zero gets the same sum. Knows nothing of Megatron.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Self

import attrs
import torch

from detcomm.errors import UnsupportedError

UNIT_EXPONENT = -298
"""The square of the smallest float32, 2^-149: the unit of the integer."""

LIMB_BITS = 32
NUM_LIMBS = 20
"""640 bits: the largest square is below 2^554 units, which leaves room for 2^86 elements."""

_CHUNK_ELEMS = 1 << 20
"""Elements that are looked at together. Below 2^21: the sum of so many limbs is exact in float64, in any order."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INFINITY = 0x7F80_0000


@attrs.frozen
class SquareSum:
    """A sum of squares.

    Args:
        units: the sum of the finite elements' squares, in units of 2^-298.
        num_infinities, num_nans: the elements that are neither.
    """

    units: int = 0
    num_infinities: int = 0
    num_nans: int = 0

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> Self:
        """Of all elements of the tensors, which may lie on one device and be of several shapes and types.

        Where there is an infinity or a NaN the finite elements are left out: the root is not theirs.

        Raises:
            UnsupportedError: a type whose squares are not exact here; float32, bfloat16 and float16 are.
        """
        units = num_infinities = num_nans = 0
        for chunk in _chunks(tensors):
            magnitudes = chunk.view(torch.int32) & 0x7FFF_FFFF
            special = torch.stack([(magnitudes == _INFINITY).sum(), (magnitudes > _INFINITY).sum()])
            squares = _squares(magnitudes)
            smallest = torch.where(squares > 0, squares, math.inf).amin()
            # One wait for the device a chunk: four numbers.
            infinities, nans, low, high = torch.stack([*special.double(), smallest, squares.amax()]).tolist()
            num_infinities += int(infinities)
            num_nans += int(nans)
            if high > 0 and not num_infinities and not num_nans:
                units += _sum_by_limbs(squares, low, high)
        return cls(0, num_infinities, num_nans) if num_infinities or num_nans else cls(units)

    def to_tensor(self, device: torch.device) -> torch.Tensor:
        """For an integer SUM over ranks: ``NUM_LIMBS`` limbs of 32 bits in int64, then the two counts."""
        mask = (1 << LIMB_BITS) - 1
        limbs = [self.units >> (LIMB_BITS * index) & mask for index in range(NUM_LIMBS)]
        return torch.tensor([*limbs, self.num_infinities, self.num_nans], dtype=torch.int64, device=device)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> Self:
        """The total of up to 2^31 ranks' tensors, summed element by element."""
        *limbs, num_infinities, num_nans = tensor.tolist()
        units = sum(limb << (LIMB_BITS * index) for index, limb in enumerate(limbs))
        return cls(units, num_infinities, num_nans)

    def root(self) -> float:
        """The square root, rounded once to float64: NaN if there is a NaN, else infinity if there is an infinity."""
        if self.num_nans:
            return math.nan
        if self.num_infinities:
            return math.inf
        # bits: 64 bits beyond the point and a sticky one are more than float() rounds away, half-way cases included.
        shifted = self.units << 128
        root = math.isqrt(shifted)
        sticky = root * root != shifted
        return math.ldexp(float(root | sticky), UNIT_EXPONENT // 2 - 64)


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """All elements as float32, in pieces of at most ``_CHUNK_ELEMS``; small tensors share one."""
    gathered: list[torch.Tensor] = []
    num_gathered = 0
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise UnsupportedError(f"exact sum of squares: expected {', '.join(map(str, _DTYPES))}, got {tensor.dtype}")
        flat = tensor.detach().reshape(-1)
        for start in range(0, len(flat), _CHUNK_ELEMS):
            piece = flat[start : start + _CHUNK_ELEMS]
            if num_gathered + len(piece) > _CHUNK_ELEMS:
                yield torch.cat(gathered)
                gathered, num_gathered = [], 0
            gathered.append(piece.float())  # exact
            num_gathered += len(piece)
    if gathered:
        yield torch.cat(gathered)


def _squares(magnitudes: torch.Tensor) -> torch.Tensor:
    """The squares as float64, from the bits without the sign."""
    exponents = magnitudes >> 23
    significands = (magnitudes & 0x7F_FFFF) | ((exponents > 0).int() << 23)
    # bits: 24 bits squared are 48, exact in float64; then a power of two, made from its bits, between 2^-298 and 2^210.
    integers = significands.double()
    powers = (1023 + 2 * (exponents.clamp(min=1).long() - 150)) << 52
    return integers * integers * powers.view(torch.float64)


def _sum_by_limbs(squares: torch.Tensor, low: float, high: float) -> int:
    """The sum in units; consumes ``squares``, whose positive elements lie from ``low`` to ``high``."""
    top = (math.frexp(high)[1] - 1 - UNIT_EXPONENT) // LIMB_BITS
    bottom = max(math.frexp(low)[1] - 48 - UNIT_EXPONENT, 0) // LIMB_BITS
    sums = []
    for index in range(top, bottom - 1, -1):
        unit = 2.0 ** (LIMB_BITS * index + UNIT_EXPONENT)
        # bits: a multiple of a power of two is cut off; every sum of 2^20 integers below 2^32 is exact, in any order.
        limbs = torch.floor(squares * (1 / unit))
        sums.append(limbs.sum())
        squares -= limbs * unit
    return sum(int(total) << (LIMB_BITS * (top - step)) for step, total in enumerate(torch.stack(sums).tolist()))
