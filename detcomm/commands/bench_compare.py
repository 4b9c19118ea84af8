# SPDX-License-Identifier: Apache-2.0
"""``detcomm bench --compare``: two reports beside each other. Measures nothing."""

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from detcomm.errors import UsageError


def print_changes(old: Path, new: Path, threshold: float | None) -> int:
    """Print what changed from one report to the other.

    Args:
        threshold: the share by which a time may grow; ``None`` judges nothing.

    Returns:
        The exit code: 1 if there is a threshold and a time grew by more, or the subject's bits are others.

    Raises:
        UsageError: a file is no report, or the two have nothing in common.
    """
    from detcomm.bench.compare import changes, read, unmatched

    before, after = read(old), read(new)
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table("", "backend", box=None)
    for name in ("old us", "new us", "new / old", "bits"):
        table.add_column(name, justify="right")
    failed = False
    found = list(changes(before, after))
    for change in found:
        slower = threshold is not None and change.ratio > 1 + threshold
        breach = change.other_bits and change.contender == after.get("subject", "detcomm")
        failed = failed or slower or (breach and threshold is not None)
        table.add_row(
            change.what,
            change.contender,
            f"{change.old_us:,.1f}",
            f"{change.new_us:,.1f}",
            f"[red]{change.ratio:.3f}[/red]" if slower else f"{change.ratio:.3f}",
            ("[red]others[/red]" if breach else "others") if change.other_bits else "",
        )
    if not found:
        raise UsageError("--compare: the two reports have no row in common")
    console.print(table)
    if number := unmatched(before, after):
        console.print(f"{number} rows are in one of the reports alone")
    if threshold is not None:
        outcome = "[red]fails[/red]" if failed else "[green]passes[/green]"
        console.print(f"{outcome}: times may grow by {threshold:.0%}; detcomm's bits must stay")
    return int(failed)
