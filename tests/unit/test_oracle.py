# SPDX-License-Identifier: Apache-2.0
"""The oracle against exact rational arithmetic, and against values worked out by hand."""

from fractions import Fraction

import numpy as np
import pytest

from tests import exact_oracle, inputs, oracle

ASSOCIATIONS = ("tree", "linear", "ring")


def _bits(array: oracle.Array, dtype: str) -> list[int]:
    return [int(word) for word in array.view(oracle.BITS[dtype])]


@pytest.mark.parametrize("accumulate", ["float32", "wire"])
@pytest.mark.parametrize("dtype", inputs.FLOATS)
def test_oracle_equals_exact_rationals(dtype: str, accumulate: str) -> None:
    count, chunk = 72, 5
    for world_size in (2, 3, 4, 5, 7, 8):
        leaves = inputs.make(dtype, count, world_size, seed=world_size)
        words = [_bits(leaf, dtype) for leaf in leaves]
        for association in ASSOCIATIONS:
            for op in ("sum", "avg", "product", "min", "max"):
                got = oracle.reduce(
                    leaves, dtype, op, association=association, ring_chunk_elems=chunk, accumulate=accumulate
                )
                expected = [
                    exact_oracle.reduce_element(
                        oracle.tree(association, world_size, i // chunk % world_size),
                        [word[i] for word in words],
                        dtype,
                        op,
                        accumulate,
                    )
                    for i in range(count)
                ]
                assert _bits(got, dtype) == expected, (association, op, world_size)


@pytest.mark.parametrize("dtype", inputs.FLOATS)
def test_premultiplication_equals_exact_rationals(dtype: str) -> None:
    leaf = inputs.rank_input(dtype, 300, 0, 3)
    for factor in (0.1, -0.5, 3.0, 1e-3, 7e4):
        got = oracle.premultiply(leaf, dtype, factor)
        exact = Fraction(factor)
        assert _bits(got, dtype) == [exact_oracle.premultiply_element(dtype, x, exact) for x in _bits(leaf, dtype)]


def test_exact_rounding_equals_the_floating_point_unit() -> None:
    """The judge is judged by the unit on what IEEE 754 defines: float64 arithmetic and a conversion."""
    fmt = exact_oracle.FORMATS["float64"]
    a, b = (inputs.rank_input("float64", 400, rank, 2, seed=9) for rank in range(2))
    with np.errstate(all="ignore"):
        total, product = oracle.narrow(a + b, "float64"), oracle.narrow(a * b, "float64")
        single = oracle.narrow(a.astype(np.float32), "float32")
    words = list(zip(_bits(a, "float64"), _bits(b, "float64"), strict=True))
    assert _bits(total, "float64") == [exact_oracle.add(fmt, x, y) for x, y in words]
    assert _bits(product, "float64") == [exact_oracle.multiply(fmt, x, y) for x, y in words]
    assert _bits(single, "float32") == [exact_oracle.convert(fmt, exact_oracle.FORMATS["float32"], x) for x, _ in words]


def test_every_16_bit_value_survives_widening_and_narrowing() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    for dtype in ("bfloat16", "float16"):
        values = every.view(oracle.storage(dtype))
        back = oracle.narrow(oracle.widen(values, dtype), dtype).view(np.uint16)
        fmt = exact_oracle.FORMATS[dtype]
        expected = [fmt.canonical_nan if fmt.is_nan(x) else x for x in range(1 << 16)]
        assert back.tolist() == expected


def test_trees_by_hand() -> None:
    assert oracle.tree("tree", 7) == (((0, 1), (2, 3)), ((4, 5), 6))
    assert oracle.tree("tree", 5) == (((0, 1), (2, 3)), 4)
    assert oracle.tree("linear", 4) == (((0, 1), 2), 3)
    assert oracle.tree("ring", 4, 1) == (((2, 3), 0), 1)
    assert oracle.tree("ring", 4, 3) == (((0, 1), 2), 3)


def test_order_by_hand() -> None:
    """1 + 2^-24 + 2^-24 in float32: from the left both halves are lost; the small ones first, they count."""
    big, half = np.array([1.0], np.float32), np.array([2.0**-24], np.float32)
    lost = oracle.reduce([big, half, half], "float32", "sum")
    kept = oracle.reduce([big, half, half], "float32", "sum", association="ring", shard_owner=0)
    assert lost[0] == np.float32(1.0)
    assert kept[0] == np.float32(1.0 + 2.0**-23)


def test_zero_and_nan_by_hand() -> None:
    minus_zero, nan, infinity = (np.array([value], np.float32) for value in (-0.0, np.nan, np.inf))
    assert _bits(oracle.reduce([minus_zero, minus_zero], "float32", "sum"), "float32") == [0x80000000]
    assert _bits(oracle.reduce([minus_zero, -minus_zero], "float32", "max"), "float32") == [0]
    assert _bits(oracle.reduce([minus_zero, -minus_zero], "float32", "min"), "float32") == [0x80000000]
    assert _bits(oracle.reduce([infinity, -infinity], "float32", "sum"), "float32") == [0x7FC00000]
    assert _bits(oracle.reduce([infinity, -nan], "float32", "max"), "float32") == [0x7FC00000]


def test_a_single_rank_keeps_every_bit() -> None:
    for dtype in inputs.DTYPES:
        leaf = inputs.rank_input(dtype, 500, 0, 1)
        for op in inputs.legal_ops(dtype):
            if op != "premul_sum":
                got = oracle.reduce([leaf], dtype, op)
                assert np.array_equal(inputs.bits(got), inputs.bits(leaf)), (dtype, op)


def test_integers_by_hand() -> None:
    def reduce(values: list[int], dtype: str, op: str) -> int:
        return int(oracle.reduce([np.array([v], dtype) for v in values], dtype, op)[0])

    assert reduce([127, 1], "int8", "sum") == -128  # wraps
    assert reduce([200, 100], "uint8", "sum") == 44
    assert reduce([16, 16], "int8", "product") == 0
    assert reduce([-3, -4], "int32", "avg") == -3  # -7 / 2 toward zero
    assert reduce([-(2**63), 0, 0], "int64", "avg") == -((2**63) // 3)
    assert reduce([2**64 - 1, 2**64 - 1], "uint64", "avg") == 2**63 - 1  # the wrapped sum is divided
    assert reduce([6, 3], "uint16", "bxor") == 5


def test_bool_is_logic() -> None:
    false, true = np.array([False]), np.array([True])
    assert oracle.reduce([true, true], "bool", "sum").tolist() == [True]
    assert oracle.reduce([true, false], "bool", "product").tolist() == [False]
    assert oracle.reduce([true, true], "bool", "bxor").tolist() == [False]


def test_complex_is_pairs_of_reals_and_ring_counts_reals() -> None:
    leaves = inputs.make("complex64", 30, 3)
    reals = [leaf.view(np.float32) for leaf in leaves]
    got = oracle.reduce(leaves, "complex64", "sum", association="ring", ring_chunk_elems=3)
    expected = oracle.reduce(reals, "float32", "sum", association="ring", ring_chunk_elems=3)
    assert np.array_equal(inputs.bits(got), inputs.bits(expected))
