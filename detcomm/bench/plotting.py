# SPDX-License-Identifier: Apache-2.0
"""A report as a picture: time and bus bandwidth over message size, and beneath them the ratio to detcomm's time."""

from pathlib import Path
from typing import Any


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the rows of a report of collectives (see ``Report.to_json``): a column a collective, type and operation."""
    from matplotlib.figure import Figure

    rows = [row for row in report["rows"] if "median_us" in row]
    columns = list(dict.fromkeys((row["collective"], row["dtype"], row["op"]) for row in rows))
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    figure = Figure(figsize=(4.2 * max(len(columns), 1) + 0.8, 8.0), layout="constrained")
    axes = figure.subplots(3, max(len(columns), 1), squeeze=False, sharex="col", height_ratios=(2, 2, 1.3))
    for (collective, dtype, op), (times, bandwidths, ratios) in zip(columns, axes.T, strict=False):
        for index, contender in enumerate(contenders):
            own = [
                row
                for row in rows
                if (row["collective"], row["dtype"], row["op"], row["contender"]) == (collective, dtype, op, contender)
            ]
            own.sort(key=lambda row: int(row["bytes"]))
            style: dict[str, Any] = {"color": f"C{index}", "marker": "o", "markersize": 3, "label": contender}
            sizes = [row["bytes"] for row in own]
            times.plot(sizes, [row["median_us"] for row in own], **style)
            times.fill_between(
                sizes, [row["best_us"] for row in own], [row["worst_us"] for row in own], color=f"C{index}", alpha=0.15
            )
            bandwidths.plot(sizes, [row["busbw"] for row in own], **style)
            if contender != report["subject"]:
                ratios.plot(sizes, [row.get("times_slower", float("nan")) for row in own], **style)
        times.set(yscale="log", ylabel="time, us", title=f"{collective} {dtype}" + ("" if op == "none" else f" {op}"))
        bandwidths.set(ylabel="busbw, GB/s", ylim=(0, None))
        ratios.set(ylabel=f"time / {report['subject']}'s", xlabel="bytes", yscale="log")
        ratios.axhline(1.0, color="black", linewidth=0.8)
        for axis in (times, bandwidths, ratios):
            axis.set_xscale("log", base=2)
            axis.grid(alpha=0.3)
    if columns:
        axes[0][0].legend(fontsize=8)
    machine = report["machine"]
    where = machine.get("gpu") or f"{machine['cores']} cores of {machine['processor']}"
    figure.suptitle(f"{report['world_size']} ranks, {where}; medians, least and largest turn shaded", fontsize=9)
    figure.savefig(path)
