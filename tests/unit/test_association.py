# SPDX-License-Identifier: Apache-2.0
"""The contract as a value: trees in writing, leaf order, digests, names."""

import pytest

from detcomm.association import LINEAR, TREE, Association, combine, combine_digests, leaf_digest, split, to_text
from detcomm.errors import UsageError


@pytest.mark.parametrize(
    ("world_size", "text"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
        (8, "(((0+1)+(2+3))+((4+5)+(6+7)))"),
        (9, "((((0+1)+(2+3))+((4+5)+(6+7)))+8)"),
    ],
)
def test_tree_splits_at_the_largest_power_of_two_below(world_size: int, text: str) -> None:
    assert TREE.text(world_size) == text


def test_linear_adds_from_left_to_right() -> None:
    assert LINEAR.text(5) == "((((0+1)+2)+3)+4)"


def test_ring_starts_after_the_owner_and_ends_at_it() -> None:
    ring = Association("ring", 10)
    assert [ring.text(4, owner) for owner in range(4)] == [
        "(((1+2)+3)+0)",
        "(((2+3)+0)+1)",
        "(((3+0)+1)+2)",
        "(((0+1)+2)+3)",
    ]


def test_ring_owner_depends_on_the_index_alone() -> None:
    ring = Association("ring", 10)
    assert [ring.element_class(index, 3) for index in (0, 9, 10, 29, 30, 1009)] == [0, 0, 1, 2, 0, 1]


def test_aligned_blocks_are_subtrees_for_any_world_size() -> None:
    for world_size in range(1, 40):
        for block in (2, 4, 8):
            blocks = [
                combine("tree", list(range(start, min(start + block, world_size))))
                for start in range(0, world_size, block)
            ]
            assert to_text(combine("tree", blocks)) == TREE.text(world_size)


def test_digests_of_neighbour_pairing_and_of_the_split_are_one() -> None:
    def recursive(digests: list[bytes]) -> bytes:
        if len(digests) == 1:
            return digests[0]
        cut = split(len(digests))
        return combine_digests("linear", [recursive(digests[:cut]), recursive(digests[cut:])])

    for world_size in range(1, 70):
        leaves = [leaf_digest(rank) for rank in range(world_size)]
        assert combine_digests("tree", leaves) == recursive(leaves)


def test_different_trees_have_different_digests() -> None:
    for world_size in (3, 4, 5, 7, 8):
        ring = Association("ring")
        digests = [TREE.digest(world_size), LINEAR.digest(world_size), *ring.digests(world_size)]
        # Among three ranks, tree and linear are one tree, and so is the ring's class that ends at the last rank.
        texts = [TREE.text(world_size), LINEAR.text(world_size)]
        texts += [ring.text(world_size, owner) for owner in range(world_size)]
        assert len(set(digests)) == len(set(texts))


def test_numerics_ids() -> None:
    assert TREE.numerics_id() == "tree/1:float32"
    assert LINEAR.numerics_id("wire") == "linear/1:wire"
    assert Association("ring").numerics_id("wire") == "ring/1[65536]:wire"


def test_the_ring_chunk_is_part_of_the_contract_of_ring_alone() -> None:
    assert Association("tree", 7) == TREE
    assert Association("ring", 7) != Association("ring", 8)


@pytest.mark.parametrize(("name", "chunk"), [("star", 1), ("ring", 0), ("ring", -5)])
def test_nonsense_is_refused(name: str, chunk: int) -> None:
    with pytest.raises(UsageError):
        Association(name, chunk)


def test_text_of_a_deep_chain_needs_no_deep_stack() -> None:
    assert LINEAR.text(5000).startswith("(" * 4999 + "0+1)")
