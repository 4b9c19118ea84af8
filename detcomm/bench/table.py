# SPDX-License-Identifier: Apache-2.0
"""The rows of a report as nccl-tests print theirs, so that what reads those reads these; then columns of our own.

From the left the columns, names, units and widths are nccl-tests'. Knows nothing of how rows are measured.
"""

from typing import Any

_TYPES = {"float32": "float", "float64": "double", "float16": "half"}
"""nccl-tests' names, where they are not torch's."""

_OPS = {"product": "prod"}

_NOT_MEASURED = f"  {'N/A':>7}  {'N/A':>6}  {'N/A':>6}  {'N/A':>6}"

_LEGEND = (
    "# time: median over turns of the mean time of a call; p99: of single calls",
    "# ratio: time over detcomm's, turn by turn; of all-reduce and reduce in place, of the others out of place",
    "# #wrong: elements, on all ranks, that are not the right ones of contributions whose result is exact",
    "# #bitdiff: elements of the message with other bits than {numerics_id} specifies, of contributions whose sums",
    "#   round; the larger of both places. digest: of those results on all ranks; equal digests, equal bits",
    "# out of place, torch's all-reduce and reduce are a copy of the input, then the call in place: it has no other",
)


def legend(numerics_id: str) -> list[str]:
    """What the columns mean, for bits that are specified by ``numerics_id``."""
    return [line.format(numerics_id=numerics_id) for line in _LEGEND] + ["#"]


def header() -> list[str]:
    """The lines above the rows of one collective."""
    left = f"# {'':>10}  {'':>12}  {'':>8}  {'':>6}  {'':>6}"
    names = "  {:>7}  {:>6}  {:>6}  {:>6}"
    ours = "  {:>7}  {:>7}  {:>6}  {:<10}  {:>9}  {}"
    return [
        f"{left}           out-of-place                       in-place          ",
        f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}"
        + names.format("time", "algbw", "busbw", "#wrong") * 2
        + ours.format("p99-out", "p99-in", "ratio", "backend", "#bitdiff", "digest"),
        f"# {'(B)':>10}  {'(elements)':>12}  {'':>8}  {'':>6}  {'':>6}"
        + names.format("(us)", "(GB/s)", "(GB/s)", "") * 2
        + ours.format("(us)", "(us)", "", "", "", "").rstrip(),
    ]


def line(row: dict[str, Any]) -> str:
    """One row of a report."""
    dtype, op = _TYPES.get(row["dtype"], row["dtype"]), _OPS.get(row["op"], row["op"])
    out, within = row["out_of_place"], row["in_place"]
    text = f"{row['bytes']:>12}  {row['count']:>12}  {dtype:>8}  {op:>6}  {row['root']:>6}"
    text += _body(out) + _body(within)
    text += "".join(f"  {_number(place, 'p99_us', 7)}" for place in (out, within))
    ratio = f"{row['times_slower']:.2f}" if "times_slower" in row else ""
    checked = [place for place in (out, within) if place is not None and "bitdiff" in place]
    others = str(max(place["bitdiff"] for place in checked)) if checked else "N/A"
    digest = checked[0]["digest"] if checked else "N/A"
    return f"{text}  {ratio:>6}  {row['contender']:<10}  {others:>9}  {digest}"


def footer(rows: list[dict[str, Any]]) -> list[str]:
    """Below the rows of one collective: the mean bus bandwidth of each contender, as nccl-tests define it."""
    lines = []
    for contender in dict.fromkeys(row["contender"] for row in rows):
        places = [row[name] for row in rows if row["contender"] == contender for name in ("out_of_place", "in_place")]
        bandwidths = [place["busbw"] for place in places if place is not None and "busbw" in place]
        if bandwidths:
            lines.append(f"# {'Avg bus bandwidth':<20} : {sum(bandwidths) / len(bandwidths):g} ({contender})")
    return [*lines, "#"]


def _body(place: dict[str, Any] | None) -> str:
    if place is None:
        return _NOT_MEASURED
    wrong = f"{place['wrong']:>6g}" if "wrong" in place else f"{'N/A':>6}"
    return f"  {_number(place, 'median_us', 7)}  {_number(place, 'algbw', 6)}  {_number(place, 'busbw', 6)}  {wrong}"


def _number(place: dict[str, Any] | None, name: str, width: int) -> str:
    """As many decimals as fit, as nccl-tests print a number."""
    if place is None or name not in place:
        return f"{'N/A':>{width}}"
    value = place[name]
    for decimals in (2, 1, 0):
        text = f"{value:{width}.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:{width}.{1 if width >= 7 else 0}e}"
