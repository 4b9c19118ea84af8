# SPDX-License-Identifier: Apache-2.0
"""The generators before the tests that lean on them: inputs must tell one order of additions from another."""

import hashlib
import itertools

import numpy as np
import pytest

from tests import inputs, oracle

COUNT = 1000
LEAST_DIFFERING = 10
"""Elements out of ``COUNT`` whose bits must depend on the order: what a small test case still sees."""


def _normal(order: oracle.Tree) -> frozenset[object] | int:
    """A tree up to the exchange of operands, which cannot change a sum."""
    return order if isinstance(order, int) else frozenset(_normal(side) for side in order)


def _orders(world_size: int) -> dict[object, tuple[str, int]]:
    """The different trees of all associations."""
    named = [("tree", 0), ("linear", 0), *(("ring", owner) for owner in range(world_size))]
    return {_normal(oracle.tree(name, world_size, owner)): (name, owner) for name, owner in named}


@pytest.mark.parametrize("accumulate", ["float32", "wire"])
@pytest.mark.parametrize("dtype", inputs.FLOATS)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_inputs_tell_orders_apart(dtype: str, op: str, accumulate: str) -> None:
    for world_size in (3, 4, 5, 7, 8):
        leaves = inputs.make(dtype, COUNT, world_size)
        results = {
            named: oracle.reduce(
                leaves, dtype, op, association=named[0], accumulate=accumulate, shard_owner=named[1]
            ).view(oracle.BITS[dtype])
            for named in _orders(world_size).values()
        }
        for one, other in itertools.combinations(results, 2):
            differing = int(np.count_nonzero(results[one] != results[other]))
            assert differing >= LEAST_DIFFERING, (world_size, one, other, differing)


def test_tree_and_linear_are_one_for_three_ranks_and_differ_from_four() -> None:
    assert oracle.tree("tree", 3) == oracle.tree("linear", 3)
    for world_size in (4, 5, 7, 8):
        assert _normal(oracle.tree("tree", world_size)) != _normal(oracle.tree("linear", world_size))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products_tell_orders_apart(dtype: str) -> None:
    for world_size in (3, 4, 5, 7, 8):
        leaves = inputs.make(dtype, COUNT, world_size)
        left = oracle.reduce(leaves, dtype, "product", association="linear")
        right = oracle.reduce(leaves, dtype, "product", association="ring", shard_owner=0)
        assert np.count_nonzero(inputs.bits(left) != inputs.bits(right)) >= LEAST_DIFFERING


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_inputs_tell_one_rounding_from_many(dtype: str) -> None:
    leaves = inputs.make(dtype, COUNT, 3)
    once = oracle.reduce(leaves, dtype, "sum")
    each = oracle.reduce(leaves, dtype, "sum", accumulate="wire")
    assert np.count_nonzero(once.view(np.uint16) != each.view(np.uint16)) >= LEAST_DIFFERING


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_plain_random_inputs_would_not_do(dtype: str) -> None:
    """The control: uniform numbers hide the order of 16-bit sums that are taken in float32."""
    generator = np.random.RandomState(0)
    leaves = [oracle.narrow(generator.rand(COUNT).astype(np.float32), dtype) for _ in range(4)]
    tree = oracle.reduce(leaves, dtype, "sum")
    linear = oracle.reduce(leaves, dtype, "sum", association="linear")
    assert np.count_nonzero(tree.view(np.uint16) != linear.view(np.uint16)) < LEAST_DIFFERING


@pytest.mark.parametrize("dtype", inputs.FLOATS)
def test_every_special_pattern_occurs(dtype: str) -> None:
    for rank in range(3):
        seen = set(inputs.rank_input(dtype, inputs.PERIOD, rank, 3).view(oracle.BITS[dtype]).tolist())
        assert set(inputs.specials(dtype)) <= seen


@pytest.mark.parametrize("dtype", inputs.INTEGERS)
def test_integers_wrap_and_reach_their_ends(dtype: str) -> None:
    info = np.iinfo(dtype)
    leaf = inputs.rank_input(dtype, COUNT, 0, 3)
    assert int(leaf.min()) == info.min
    assert int(leaf.max()) == info.max
    exact = sum(x.astype(object) for x in inputs.make(dtype, COUNT, 3))
    assert np.count_nonzero((exact < info.min) | (exact > info.max)) >= LEAST_DIFFERING


def test_bools_have_both_results_for_each_operation() -> None:
    leaves = inputs.make("bool", COUNT, 5)
    for op in inputs.legal_ops("bool"):
        assert set(oracle.reduce(leaves, "bool", op).tolist()) == {False, True}, op


def test_a_number_depends_on_its_rank_seed_and_place_alone() -> None:
    for dtype in inputs.DTYPES:
        whole = inputs.rank_input(dtype, 2 * inputs.PERIOD + 3, 1, 3, seed=4)
        again = inputs.rank_input(dtype, 100, 1, 3, seed=4)
        assert np.array_equal(inputs.bits(whole[:100]), inputs.bits(again))
        assert not np.array_equal(inputs.bits(again), inputs.bits(inputs.rank_input(dtype, 100, 2, 3, seed=4)))
        assert not np.array_equal(inputs.bits(again), inputs.bits(inputs.rank_input(dtype, 100, 1, 3, seed=5)))


def test_the_numbers_never_change() -> None:
    """Golden files are made from them, and a NumPy with other random streams must not matter."""
    digest = hashlib.blake2b(digest_size=16)
    for dtype in inputs.DTYPES:
        for leaf in inputs.make(dtype, 200, 3, seed=7):
            digest.update(leaf.tobytes())
    assert digest.hexdigest() == "3d976aa6417585d6e5e43100dee17b36"
