# SPDX-License-Identifier: Apache-2.0
"""An association as a drawing for the terminal.

    +
    ├── +
    │   ├── 0
    │   └── 1
    └── 2

Read it from the leaves inwards: the upper branch is the left operand.
"""

from rich.tree import Tree

from detcomm.association import Expr

FOLDED_BEYOND = 32
"""Subtrees below the first levels are written as ranges in worlds larger than this."""


def draw(expr: Expr, max_leaves: int = FOLDED_BEYOND) -> Tree:
    """The tree of one element class, deep parts written as a range of ranks.

    Args:
        max_leaves: how many leaves to draw before subtrees are folded into one line.
    """
    depth = max(max_leaves.bit_length() - 1, 1)
    folded = _num_leaves(expr) > max_leaves
    root = Tree(_label(expr))
    pending = [(root, expr, 0)]
    while pending:
        tree, node, level = pending.pop()
        if not isinstance(node, tuple):
            continue
        for child in node:
            if folded and level + 1 >= depth and isinstance(child, tuple):
                tree.add(f"{_edge_leaf(child, 0)} … {_edge_leaf(child, 1)}  ({_num_leaves(child)} ranks)")
            else:
                pending.append((tree.add(_label(child)), child, level + 1))
    return root


def _label(expr: Expr) -> str:
    return "+" if isinstance(expr, tuple) else str(expr)


def _edge_leaf(expr: Expr, side: int) -> int:
    while isinstance(expr, tuple):
        expr = expr[side]
    return expr


def _num_leaves(expr: Expr) -> int:
    count, pending = 0, [expr]
    while pending:
        node = pending.pop()
        if isinstance(node, tuple):
            pending += node
        else:
            count += 1
    return count
