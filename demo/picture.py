# SPDX-License-Identifier: Apache-2.0
"""Draw what the demo found: how many parameters differ from the backend's first run, step by step."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from demo.__main__ import Outcome

_COLOURS = {"gloo": "#c0392b", "detcomm": "#1e8449"}
_STYLES = ("-", "--", ":")


def draw(outcomes: "Sequence[Outcome]", path: Path) -> None:
    """Write the picture: one line for each run but the first of its backend."""
    mpl.rcParams["font.size"] = 10
    figure = Figure(figsize=(8, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    seen: dict[str, int] = {}
    for outcome in outcomes:
        backend = outcome.setting.backend
        order = seen.setdefault(backend, 0)
        seen[backend] += 1
        if order == 0:
            continue  # what the others are compared with
        steps = range(1, len(outcome.differing) + 1)
        share = [100 * count / outcome.num_parameters for count in outcome.differing]
        axes.plot(steps, share, _STYLES[order - 1], color=_COLOURS[backend], label=outcome.setting.name, linewidth=2)
    axes.set_xlabel("training step")
    axes.set_ylabel("parameters with other bits, %")
    axes.set_title("The same training as with buckets of 25 MB, run another way")
    axes.set_ylim(-2, 1.4 * max(2, axes.get_ylim()[1]))  # room for the legend
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path)
