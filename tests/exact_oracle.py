# SPDX-License-Identifier: Apache-2.0
"""IEEE arithmetic on single numbers by exact rationals, to check the oracle. Uses no floating-point unit.

A number is the integer of its bits in a ``Format``. Every operation computes the exact rational and rounds it
once, to nearest even. Knows neither NumPy nor detcomm.
"""

from dataclasses import dataclass
from fractions import Fraction

Tree = int | tuple["Tree", "Tree"]


@dataclass(frozen=True)
class Format:
    """A binary interchange format: one sign bit, ``exponent_bits``, ``fraction_bits``."""

    exponent_bits: int
    fraction_bits: int

    @property
    def width(self) -> int:
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def sign_bit(self) -> int:
        return 1 << (self.width - 1)

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.fraction_bits

    @property
    def canonical_nan(self) -> int:
        """Positive, quiet, no payload."""
        return self.infinity | 1 << (self.fraction_bits - 1)

    def is_nan(self, bits: int) -> bool:
        return bits & ~self.sign_bit > self.infinity

    def is_infinite(self, bits: int) -> bool:
        return bits & ~self.sign_bit == self.infinity

    def negative(self, bits: int) -> bool:
        return bool(bits & self.sign_bit)

    def value(self, bits: int) -> Fraction:
        """The rational of a finite number."""
        exponent = (bits & ~self.sign_bit) >> self.fraction_bits
        fraction = bits & ((1 << self.fraction_bits) - 1)
        significand = fraction + ((1 << self.fraction_bits) if exponent else 0)
        scale = max(exponent, 1) - self.bias - self.fraction_bits
        magnitude = significand * Fraction(2) ** scale
        return -magnitude if self.negative(bits) else magnitude

    def round(self, exact: Fraction, negative: bool) -> int:
        """The nearest number, ties to even; ``negative`` gives the sign of a zero."""
        magnitude = abs(exact)
        sign = self.sign_bit if negative else 0
        # The exponent of the leading bit, but never below that of the smallest normal number.
        leading = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        if magnitude and magnitude < Fraction(2) ** leading:
            leading -= 1
        quantum = max(leading if magnitude else 1 - self.bias, 1 - self.bias) - self.fraction_bits
        significand = round(magnitude / Fraction(2) ** quantum)  # Python rounds rationals half to even
        # A significand that reaches 2^(fraction_bits+1) carries into the exponent, as it should.
        biased = quantum + self.fraction_bits + self.bias - 1
        return sign | min((biased << self.fraction_bits) + significand, self.infinity)


FORMATS = {
    "float64": Format(11, 52),
    "float32": Format(8, 23),
    "bfloat16": Format(8, 7),
    "float16": Format(5, 10),
}


def add(fmt: Format, a: int, b: int) -> int:
    if fmt.is_nan(a) or fmt.is_nan(b):
        return fmt.canonical_nan
    if fmt.is_infinite(a) or fmt.is_infinite(b):
        if fmt.is_infinite(a) and fmt.is_infinite(b) and a != b:
            return fmt.canonical_nan
        return a if fmt.is_infinite(a) else b
    exact = fmt.value(a) + fmt.value(b)
    # A sum of zero is +0, unless both operands are -0.
    negative = exact < 0 if exact else fmt.negative(a) and fmt.negative(b)
    return fmt.round(exact, negative)


def multiply(fmt: Format, a: int, b: int) -> int:
    if fmt.is_nan(a) or fmt.is_nan(b):
        return fmt.canonical_nan
    negative = fmt.negative(a) != fmt.negative(b)
    if fmt.is_infinite(a) or fmt.is_infinite(b):
        other = b if fmt.is_infinite(a) else a
        if not fmt.is_infinite(other) and fmt.value(other) == 0:
            return fmt.canonical_nan
        return fmt.infinity | (fmt.sign_bit if negative else 0)
    return fmt.round(fmt.value(a) * fmt.value(b), negative)


def divide(fmt: Format, a: int, divisor: int) -> int:
    """By a positive whole number that the format holds after rounding."""
    if fmt.is_nan(a):
        return fmt.canonical_nan
    if fmt.is_infinite(a):
        return a
    rounded = fmt.value(fmt.round(Fraction(divisor), negative=False))
    return fmt.round(fmt.value(a) / rounded, fmt.negative(a))


def convert(src: Format, dst: Format, bits: int) -> int:
    if src.is_nan(bits):
        return dst.canonical_nan
    negative = src.negative(bits)
    if src.is_infinite(bits):
        return dst.infinity | (dst.sign_bit if negative else 0)
    return dst.round(src.value(bits), negative)


def extremum(fmt: Format, a: int, b: int, op: str) -> int:
    """IEEE 754-2019 minimum or maximum."""
    if fmt.is_nan(a) or fmt.is_nan(b):
        return fmt.canonical_nan

    def key(bits: int) -> tuple[Fraction, int]:
        sign = -1 if fmt.negative(bits) else 1
        size = Fraction(2) ** 20000 if fmt.is_infinite(bits) else abs(fmt.value(bits))
        return (sign * size, sign)

    return min(a, b, key=key) if op == "min" else max(a, b, key=key)


def reduce_element(order: Tree, leaves: list[int], dtype: str, op: str, accumulate: str) -> int:
    """One element of a reduction of at least two leaves: bits in, bits out."""
    fmt = FORMATS[dtype]
    wide = FORMATS["float64" if dtype == "float64" else "float32"]

    def evaluate(node: Tree) -> int:
        if isinstance(node, int):
            return leaves[node] if op in ("min", "max") else convert(fmt, wide, leaves[node])
        left, right = evaluate(node[0]), evaluate(node[1])
        if op in ("min", "max"):
            return extremum(fmt, left, right, op)
        total = multiply(wide, left, right) if op == "product" else add(wide, left, right)
        return convert(fmt, wide, convert(wide, fmt, total)) if accumulate == "wire" else total

    total = evaluate(order)
    if op in ("min", "max"):
        return total
    if op == "avg":
        total = divide(wide, total, len(leaves))
    return convert(wide, fmt, total)


def premultiply_element(dtype: str, leaf: int, factor: Fraction) -> int:
    """What the sender of a PREMUL_SUM sends."""
    fmt = FORMATS[dtype]
    wide = FORMATS["float64" if dtype == "float64" else "float32"]
    rounded = wide.round(factor, negative=factor < 0)
    return convert(wide, fmt, multiply(wide, convert(fmt, wide, leaf), rounded))
