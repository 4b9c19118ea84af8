# SPDX-License-Identifier: Apache-2.0
"""``detcomm verify``: the guarantees one by one, on this cluster, for detcomm or any other backend."""

import json
import sys
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from detcomm.association import NAMES
from detcomm.collectives import DType, is_legal
from detcomm.commands import lists
from detcomm.commands.output_files import JsonOption
from detcomm.commands.progress import progress
from detcomm.commands.ranks import NprocOption, take_place
from detcomm.errors import UsageError
from detcomm.reducers import check_can_examine, examine
from detcomm.verification import Scope, Verdict, verify
from detcomm.verification.contract import Guarantee
from detcomm.verification.run import QUICK

_NOTHING = "–"
"""In place of a cell that was not checked."""

_WIDTH = 110
"""Columns of the output where it does not go to a terminal."""


def verify_command(
    nproc: NprocOption = None,
    backend: Annotated[str, typer.Option(help="detcomm, another backend of torch.distributed, or mpi.")] = "detcomm",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    associations: Annotated[str, typer.Option("--association", help="Of detcomm, a list.")] = ",".join(NAMES),
    dtypes: Annotated[str | None, typer.Option(help="Element types, a list; default: all.")] = None,
    ops: Annotated[str | None, typer.Option(help="Operations, a list; default: all.")] = None,
    count: Annotated[int | None, typer.Option(min=256, help="Elements of a message.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer types and chunk sizes: a minute on 4 ranks.")] = False,
    imports: Annotated[str, typer.Option("--import", help="Modules that register a backend, a list.")] = "",
    json_file: JsonOption = None,
) -> None:
    """Check bit by bit what is guaranteed, and print guarantee by type.

    Exits with 1 if a guarantee does not hold.
    """
    scope = QUICK if quick else Scope()
    names = tuple(lists.known_values(associations, {name: name for name in NAMES}, "--association"))
    scope = replace(scope, associations=names, count=count or scope.count)
    if dtypes is not None:
        scope = replace(scope, dtypes=lists.to_dtypes(dtypes, "--dtypes"))
    if ops is not None:
        scope = replace(scope, ops=lists.to_ops(ops, "--ops"))
    if not any(is_legal(op, dtype) for op in scope.ops for dtype in scope.dtypes):
        raise UsageError("--ops, --dtypes: none of these operations is defined on any of these types")
    check_can_examine(backend, device, lists.split(imports))
    place = take_place(nproc, over_mpi=backend == "mpi")
    examined = examine(backend, device, lists.split(imports))
    if count is not None and count < examined.world_size:
        raise UsageError(f"--count: expected at least {examined.world_size}, one element a rank, got {count}")
    console = Console(quiet=not place.speaks, width=None if sys.stdout.isatty() else _WIDTH)
    with progress(place.speaks, "verifying") as say:
        verdict = verify(examined, scope, say)
    if not sum(verdict.num_checks.values()):
        raise UsageError(f"nothing was checked: {backend} has none of these operations on any of these types")
    if place.speaks:
        console.print(f"[bold]{backend}[/bold] on {device}, {examined.world_size} ranks, {scope.count} elements")
        _show(console, verdict)
        if json_file is not None:
            content = {"backend": backend, "device": device, "count": scope.count} | verdict.to_json()
            json_file.write_text(json.dumps(content, indent=1) + "\n")
    examined.tell(None)  # rank 0 has told all: a launcher ends every rank as soon as one exits with 1
    examined.close()
    if not verdict.holds:
        raise typer.Exit(1)


def _show(console: Console, verdict: Verdict) -> None:
    for contract in dict.fromkeys(contract for contract, _ in verdict.rows()):
        guarantees = [guarantee for own, guarantee in verdict.rows() if own == contract]
        table = Table("", *(guarantee.value for guarantee in guarantees), title=escape(contract), title_justify="left")
        for dtype in verdict.dtypes():
            cells = [_cell(verdict, contract, guarantee, dtype) for guarantee in guarantees]
            if any(cell != _NOTHING for cell in cells):
                table.add_row(dtype.value, *cells)
        console.print(table)
    if verdict.partly:
        console.print("(holds): promised and checked in part: prefixes of a message; reduce and broadcast")
    for name, (got, expected) in verdict.digests.items():
        agrees = "[green]as everywhere[/green]" if got == expected else f"[red]expected {expected}[/red]"
        console.print(f"golden digest {escape(name):24} {got}  {agrees}", soft_wrap=True)
    if verdict.world_size < 3:
        console.print("[yellow]fewer than 3 ranks cannot show an order of additions, since a + b = b + a[/yellow]")
    for failure in verdict.failures:
        console.print(f"FAILS {failure}", style="red", markup=False, soft_wrap=True)
    total = sum(verdict.num_checks.values())
    failed = sum(verdict.num_failures.values())
    outcome = "[green]holds[/green]" if verdict.holds else f"[red]does not hold: {failed:,} failures[/red]"
    console.print(f"{total:,} comparisons on each rank: {outcome}")


def _cell(verdict: Verdict, contract: str, guarantee: Guarantee, dtype: DType) -> str:
    row = (contract, guarantee, dtype)
    number = verdict.num_checks.get(row, 0)
    if not number:
        return _NOTHING
    if failed := verdict.num_failures.get(row, 0):
        return f"[red]FAILS {failed}[/red]"
    if guarantee is Guarantee.CONTROL:
        return "differs"
    return "(holds)" if row in verdict.partly else "holds"
