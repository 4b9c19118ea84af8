# SPDX-License-Identifier: Apache-2.0
"""From the sizes of smallest common subtrees to the binary tree. Pure; knows nothing of how sizes are measured.

In a binary tree over n ranks, two ranks meet at a node, and that node has a size: how many ranks lie below it. The
sizes for all pairs determine the tree but for the order of the two operands of an addition, which nothing can show,
since a + b = b + a. The canonical form puts the larger operand left, and of two equal ones that with the lowest rank.
"""

from collections.abc import Mapping, Sequence

from detcomm.association import Expr

Pair = tuple[int, int]
"""Two ranks, the lower one first."""


class NotATree(ValueError):
    """The sizes are not those of a binary tree; the text says why."""


def rebuild(world_size: int, sizes: Mapping[Pair, int]) -> Expr:
    """The binary tree with these sizes, in canonical form.

    Args:
        sizes: for each pair of ranks the size of the smallest subtree that holds both.

    Raises:
        NotATree: no binary tree has these sizes.
    """
    return _rebuild(list(range(world_size)), sizes)


def canonical(expr: Expr) -> Expr:
    """The same additions with the operands of each in canonical order."""
    return _canonical(expr)[0]


def _canonical(expr: Expr) -> tuple[Expr, int, int]:
    """The canonical form, its number of leaves and its lowest rank."""
    if not isinstance(expr, tuple):
        return expr, 1, expr
    left, right = sorted((_canonical(child) for child in expr), key=lambda part: (-part[1], part[2]))
    return (left[0], right[0]), left[1] + right[1], min(left[2], right[2])


def _rebuild(ranks: Sequence[int], sizes: Mapping[Pair, int]) -> Expr:
    if len(ranks) == 1:
        return ranks[0]
    # Ranks that meet below this node are on the same side of it.
    sides: list[list[int]] = []
    for rank in ranks:
        homes = [side for side in sides if any(_size(sizes, rank, other) < len(ranks) for other in side)]
        if len(homes) > 1:
            raise NotATree(f"rank {rank} meets ranks of different subtrees below {_text(ranks)}")
        if homes:
            homes[0].append(rank)
        else:
            sides.append([rank])
    for side in sides:
        for rank in side:
            for other in ranks:
                size = _size(sizes, rank, other) if other != rank else 1
                if (size == len(ranks)) != (other not in side) or size > len(ranks):
                    raise NotATree(f"of {_text(ranks)}, {rank} and {other} would meet in a subtree of {size}")
    if len(sides) == 1:
        raise NotATree(f"{_text(ranks)} never meet all together")
    if len(sides) > 2:
        raise NotATree(f"{_text(ranks)} split into {len(sides)} parts at once: no binary addition does that")
    left, right = sorted(sides, key=lambda side: (-len(side), side[0]))
    return (_rebuild(left, sizes), _rebuild(right, sizes))


def _size(sizes: Mapping[Pair, int], a: int, b: int) -> int:
    return sizes[(a, b) if a < b else (b, a)]


def _text(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}"
