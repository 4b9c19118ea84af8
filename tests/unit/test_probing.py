# SPDX-License-Identifier: Apache-2.0
"""Probing finds any tree and any precision, and says where there is no tree. Ranks are threads of this process."""

from collections.abc import Callable
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from detcomm.association import LINEAR, TREE, Association, Expr
from detcomm.collectives import Accumulate, Collective, DType
from detcomm.commands.output_files import check_can_draw
from detcomm.errors import UsageError
from detcomm.probing import Probed, probe
from detcomm.probing.drawing import draw
from detcomm.probing.probe import check_can_probe
from detcomm.probing.replay import evaluate
from detcomm.probing.sizes import decode
from detcomm.probing.tree import NotATree, canonical, rebuild
from detcomm.reducers import Examined
from detcomm.transports.base import Bytes
from tests.in_process_library import Request, examine_by_threads


def _leaves(expr: Expr) -> list[int]:
    return _leaves(expr[0]) + _leaves(expr[1]) if isinstance(expr, tuple) else [expr]


def _sizes_of(expr: Expr) -> dict[tuple[int, int], int]:
    if not isinstance(expr, tuple):
        return {}
    left, right = _leaves(expr[0]), _leaves(expr[1])
    met = {(min(a, b), max(a, b)): len(left) + len(right) for a in left for b in right}
    return met | _sizes_of(expr[0]) | _sizes_of(expr[1])


@st.composite
def trees(draw: st.DrawFn) -> Expr:
    """Any binary tree over any order of 2 to 12 ranks."""
    parts: list[Expr] = list(draw(st.permutations(range(draw(st.integers(2, 12))))))
    while len(parts) > 1:
        index = draw(st.integers(0, len(parts) - 2))
        parts[index : index + 2] = [(parts[index], parts[index + 1])]
    return parts[0]


@hypothesis.given(trees())
def test_sizes_tell_the_tree(tree: Expr) -> None:
    assert rebuild(len(_leaves(tree)), _sizes_of(tree)) == canonical(tree)


def test_canonical_form_forgets_the_order_of_operands_alone() -> None:
    assert canonical((0, ((3, 2), 1))) == (((2, 3), 1), 0)
    assert canonical(((3, 2), (1, 0))) == ((0, 1), (2, 3))
    assert canonical(((0, 1), 2)) != canonical((0, (1, 2)))


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (dict.fromkeys(combinations(range(3), 2), 3), "split into 3 parts"),
        (dict.fromkeys(combinations(range(3), 2), 2), "never meet"),
        ({(0, 1): 2, (0, 2): 3, (1, 2): 2}, "would meet in a subtree of 3"),
        ({(0, 1): -1, (0, 2): 3, (1, 2): 3}, "never meet"),
        ({(0, 1): 2, (0, 2): 4, (1, 2): 4}, "would meet in a subtree of 4"),
    ],
)
def test_sizes_of_no_binary_tree_are_refused(sizes: dict[tuple[int, int], int], says: str) -> None:
    with pytest.raises(NotATree, match=says):
        rebuild(3, sizes)


def _by_tree(tree_of: Callable[[int, int], Expr], accumulate: Accumulate = "float32") -> Callable[[Request], Bytes]:
    """A library that adds element ``i`` of ``count`` by ``tree_of(i, count)``."""

    def reduce(request: Request) -> Bytes:
        count = request.inputs[0].size // request.dtype.itemsize
        trees = [tree_of(index, count) for index in range(count)]
        output = np.empty((count, request.dtype.itemsize), np.uint8)
        for tree in dict.fromkeys(trees):
            result = evaluate(tree, request.inputs, request.dtype, accumulate).reshape(output.shape)
            mine = [index for index, each in enumerate(trees) if each == tree]
            output[mine] = result[mine]
        return output.reshape(-1)

    return reduce


def _probe(
    world_size: int,
    reduce: Callable[[Request], Bytes],
    dtype: DType = DType.FLOAT32,
    count: int = 6,
    collective: Collective = Collective.ALL_REDUCE,
    root: int = 0,
) -> Probed:
    def on_rank(examined: Examined) -> Probed:
        with examined.opened() as reducer:
            assert reducer is not None
            return probe(examined, reducer, collective, dtype, count, root=root)

    first, *others = examine_by_threads(world_size, reduce, on_rank)
    assert all(probed == first for probed in others)
    return first


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize("accumulate", ["float32", "wire"])
def test_finds_trees_by_position_and_the_precision(dtype: DType, accumulate: Accumulate) -> None:
    first, second = ((0, 1), ((2, 4), 3)), ((((4, 3), 2), 1), 0)
    probed = _probe(5, _by_tree(lambda i, _: first if i < 4 else second, accumulate), dtype)
    assert [(found.start, found.stop, found.tree) for found in probed.ranges] == [
        (0, 4, canonical(first)),
        (4, 6, canonical(second)),
    ]
    assert probed.explained
    expected = f"added in {dtype.value}"
    if dtype.itemsize == 2:
        expected = "rounded at each addition" if accumulate == "wire" else "added in float32, rounded once"
    assert probed.precision == expected


@pytest.mark.parametrize("collective", [Collective.REDUCE, Collective.REDUCE_SCATTER])
def test_probes_collectives_whose_results_lie_on_some_ranks(collective: Collective) -> None:
    chains: list[Expr] = [((0, 1), 2), ((1, 2), 0), ((0, 2), 1)]
    probed = _probe(3, _by_tree(lambda i, count: chains[i * 3 // count]), collective=collective, root=2)
    assert [found.tree for found in probed.ranges] == chains
    assert probed.explained


def test_promises_are_compared_element_by_element() -> None:
    ring = Association("ring", 2)
    probed = _probe(3, _by_tree(lambda i, _: ring.tree(3, ring.element_class(i, 3))), count=8)
    assert not list(probed.breaches(ring))
    assert list(probed.breaches(Association("ring", 3)))
    assert next(probed.breaches(TREE)).startswith("[0,2): expected ((0+1)+2), got ((1+2)+0)")


def test_a_chain_is_not_a_balanced_tree() -> None:
    probed = _probe(4, _by_tree(lambda *_: LINEAR.tree(4)), count=1)
    assert not list(probed.breaches(LINEAR))
    assert list(probed.breaches(TREE)) == ["[0,1): expected ((0+1)+(2+3)), got (((0+1)+2)+3)"]


def _exact(request: Request) -> Bytes:
    """All operands at once, rounded once: what no binary tree does."""
    columns = zip(*(decode(data, request.dtype) for data in request.inputs), strict=True)
    totals = [float(sum(map(Fraction, column), Fraction(0))) for column in columns]
    return np.array(totals, request.dtype.value).view(np.uint8)


def test_what_is_no_binary_tree_is_said_to_be_none() -> None:
    probed = _probe(4, _exact, count=2)
    assert [(found.start, found.stop, found.tree) for found in probed.ranges] == [(0, 2, None)]
    assert "no binary tree" in probed.ranges[0].text
    assert not probed.explained
    assert list(probed.breaches(TREE))


def test_ranks_that_differ_are_noticed() -> None:
    def reduce(request: Request) -> Bytes:
        tree: Expr = ((0, 1), 2) if request.rank else ((1, 2), 0)
        return evaluate(tree, request.inputs, request.dtype, "float32")

    probed = _probe(3, reduce, count=40)
    assert not probed.ranks_agree
    assert not probed.explained


def test_runs_that_differ_are_noticed() -> None:
    def reduce(request: Request) -> Bytes:
        tree: Expr = ((0, 1), 2) if request.index % 2 else ((1, 2), 0)
        return evaluate(tree, request.inputs, request.dtype, "float32")

    assert not _probe(3, reduce, count=40).repeats


@pytest.mark.parametrize(
    ("world_size", "collective", "dtype", "count", "says"),
    [
        (65, Collective.ALL_REDUCE, DType.FLOAT32, 1, "2 to 64 ranks"),
        (1, Collective.ALL_REDUCE, DType.FLOAT32, 1, "2 to 64 ranks"),
        (4, Collective.ALL_GATHER, DType.FLOAT32, 1, "adds nothing"),
        (4, Collective.ALL_REDUCE, DType.INT32, 1, "expected one of"),
        (4, Collective.ALL_REDUCE, DType.FLOAT32, 0, "at least one"),
        (4, Collective.REDUCE_SCATTER, DType.FLOAT32, 6, "divide evenly"),
    ],
)
def test_what_cannot_be_probed_is_refused(
    world_size: int, collective: Collective, dtype: DType, count: int, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        check_can_probe(world_size, collective, dtype, count)


def test_draws_each_different_tree(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ring = Association("ring", 1)
    probed = _probe(4, _by_tree(lambda i, _: ring.tree(4, ring.element_class(i, 4))))
    for name in ("trees.svg", "trees.png"):
        check_can_draw(tmp_path / name, "--draw")
        draw("ring", [probed], tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    with pytest.raises(UsageError, match="ends in one of"):
        check_can_draw(tmp_path / "trees.doc", "--draw")
