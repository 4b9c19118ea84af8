# SPDX-License-Identifier: Apache-2.0
"""The trees that were found, as a picture: PNG, SVG or whatever else matplotlib writes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from detcomm.association import Expr
from detcomm.probing.probe import Probed, Range

MAX_TREES = 16
"""Different trees drawn of one probing; the table has them all."""


def draw(title: str, probings: Sequence[Probed], path: Path) -> None:
    """Draw each different tree of each probing, with the elements that it adds."""
    from matplotlib.figure import Figure

    rows = [list(_trees(probed))[:MAX_TREES] for probed in probings]
    width = max(len(row) for row in rows)
    figure = Figure(figsize=(max(2.6 * width, 6.0), 2.6 * len(rows) + 0.6), layout="constrained")
    axes = figure.subplots(len(rows), width, squeeze=False)
    for probed, row, line in zip(probings, rows, axes, strict=True):
        for axis in line:
            axis.set_axis_off()
        for (tree, elements), axis in zip(row, line, strict=False):
            _draw_tree(axis, tree)
            axis.set_title(elements, fontsize=8)
        what = f"{probed.collective.value} {probed.dtype.value}[{probed.count}]\n{probed.precision or 'not explained'}"
        line[0].text(0.0, -0.08, what, transform=line[0].transAxes, fontsize=8, va="top")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)


def _trees(probed: Probed) -> Iterator[tuple[Expr, str]]:
    by_tree: dict[str, list[Range]] = {}
    for found in probed.ranges:
        if found.tree is not None:
            by_tree.setdefault(found.text, []).append(found)
    for ranges in by_tree.values():
        tree = ranges[0].tree
        assert tree is not None
        more = f" and {len(ranges) - 1} more" if len(ranges) > 1 else ""
        yield tree, f"[{ranges[0].start},{ranges[0].stop}){more}"


def _draw_tree(axis: Any, tree: Expr) -> None:
    """Leaves side by side at the bottom, each addition above its operands."""
    next_leaf = iter(range(1 << 16))

    def place(node: Expr) -> tuple[float, float]:
        if not isinstance(node, tuple):
            x = float(next(next_leaf))
            axis.text(x, -0.15, str(node), ha="center", va="top", fontsize=8)
            return x, 0.0
        (left_x, left_y), (right_x, right_y) = place(node[0]), place(node[1])
        x, y = (left_x + right_x) / 2, max(left_y, right_y) + 1.0
        axis.plot([left_x, left_x, right_x, right_x], [left_y, y, y, right_y], color="C0", linewidth=1.2)
        return x, y

    x, y = place(tree)
    axis.plot([x, x], [y, y + 0.4], color="C0", linewidth=1.2)
    axis.margins(x=0.1, y=0.15)
