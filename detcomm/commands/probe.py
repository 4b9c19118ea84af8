# SPDX-License-Identifier: Apache-2.0
"""``detcomm probe``: the real order of additions of any backend, found from outside."""

import json
from contextlib import ExitStack
from itertools import count as count_from
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from detcomm.association import NAMES, Association
from detcomm.collectives import Collective, ReduceOp
from detcomm.commands import lists
from detcomm.commands.output_files import JsonOption, check_can_draw, writable
from detcomm.commands.progress import progress
from detcomm.commands.ranks import NprocOption, take_place
from detcomm.errors import UsageError
from detcomm.options import Options
from detcomm.probing import Probed, probe
from detcomm.probing.drawing import draw
from detcomm.probing.probe import check_can_probe
from detcomm.reducers import check_can_examine, examine

_SHOWN_RANGES = 32
"""Rows of one table; the JSON has them all."""


def probe_command(
    nproc: NprocOption = None,
    backend: Annotated[str, typer.Option(help="A backend of torch.distributed, or mpi.")] = "detcomm",
    collective: Annotated[Collective, typer.Option(help="Which reduction.")] = Collective.ALL_REDUCE,
    sizes: Annotated[str, typer.Option(help="Elements of the whole message, a list.")] = "1000",
    dtypes: Annotated[str, typer.Option(help="Element types, a list.")] = "float32",
    root: Annotated[int, typer.Option(min=0, help="Receiver of a reduce.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    expect: Annotated[
        str | None, typer.Option(help="tree, linear or ring: fail if the order is another. Default for detcomm.")
    ] = None,
    imports: Annotated[str, typer.Option("--import", help="Modules that register a backend, a list.")] = "",
    json_file: JsonOption = None,
    drawing: Annotated[
        Path | None, typer.Option("--draw", callback=writable, help="Draw the trees to this PNG or SVG file.")
    ] = None,
) -> None:
    """Find the order of additions of a backend by probing it, and whether it rounds at each of them.

    Exits with 1 if the trees do not explain every bit, or are not the expected ones.
    """
    counts = lists.to_counts(sizes, "--sizes")
    types = lists.to_dtypes(dtypes, "--dtypes")
    options = Options.from_environment()
    promised = _promise(expect, backend, options)
    if nproc is not None:
        for dtype in types:
            for count in counts:
                check_can_probe(nproc, collective, dtype, count)
        if root >= nproc:
            raise UsageError(f"--root: expected a rank below {nproc}, got {root}")
    if drawing is not None:
        check_can_draw(drawing, "--draw")
    check_can_examine(backend, device, lists.split(imports))
    place = take_place(nproc, over_mpi=backend == "mpi")
    examined = examine(backend, device, lists.split(imports))
    if refusals := [why for dtype in types if (why := examined.refusal(ReduceOp.SUM, dtype)) is not None]:
        raise UsageError(f"--dtypes: {refusals[0]}")
    console = Console(quiet=not place.speaks)
    if root >= examined.world_size:
        raise UsageError(f"--root: expected a rank below {examined.world_size}, got {root}")
    probings: list[Probed] = []
    with ExitStack() as stack:
        reducer = stack.enter_context(examined.opened())
        assert reducer is not None
        say = stack.enter_context(progress(place.speaks, "probing"))
        num_pairs = examined.world_size * (examined.world_size - 1) // 2
        probed_pairs = count_from(1)
        for dtype in types:
            for count in counts:
                probings.append(
                    probe(
                        examined,
                        reducer,
                        collective,
                        dtype,
                        count,
                        root=root,
                        advance=lambda: say(f"{next(probed_pairs)} of {num_pairs * len(counts) * len(types)} pairs"),
                    )
                )
    breaches = [breach for probed in probings if promised for breach in probed.breaches(promised)]
    if place.speaks:
        console.print(f"[bold]{backend}[/bold] on {device}, {examined.world_size} ranks")
        for probed in probings:
            _show(console, probed)
        _judge(console, promised, breaches)
        if json_file is not None:
            content = {"backend": backend, "device": device, "promised": promised and promised.numerics_id()}
            probed_json = [probed.to_json() for probed in probings]
            json_file.write_text(json.dumps(content | {"probings": probed_json, "breaches": breaches}, indent=1) + "\n")
        if drawing is not None:
            draw(f"{backend}, {examined.world_size} ranks", probings, drawing)
    examined.tell(None)  # rank 0 has told all: a launcher ends every rank as soon as one exits with 1
    examined.close()
    if breaches or not all(probed.explained for probed in probings):
        raise typer.Exit(1)


def _show(console: Console, probed: Probed) -> None:
    console.print(f"\n{probed.collective.value} {probed.dtype.value}[{probed.count}]", markup=False)
    table = Table("elements", "order of additions")
    for found in probed.ranges[:_SHOWN_RANGES]:
        table.add_row(escape(f"[{found.start},{found.stop})"), found.text)
    if len(probed.ranges) > _SHOWN_RANGES:
        table.add_row("…", f"{len(probed.ranges) - _SHOWN_RANGES} more ranges")
    console.print(table)
    for model, number in probed.reproduced.items():
        told = f"{number:,} of {probed.replayed:,} random elements reproduced bit by bit if {model}"
        console.print(told, soft_wrap=True)
    if not probed.ranks_agree:
        console.print("[red]the ranks received different bits[/red]")
    if not probed.repeats:
        console.print("[red]the same reduction gave other bits the second time[/red]")
    if probed.precision is None:
        console.print("[red]not explained[/red] by these trees and any one model of precision")


def _judge(console: Console, promised: Association | None, breaches: list[str]) -> None:
    if promised is None:
        return
    if not breaches:
        console.print(f"\n[green]as promised[/green]: {promised.numerics_id().partition(':')[0]}")
    for breach in breaches[:_SHOWN_RANGES]:
        console.print(f"[red]not as promised[/red]: {promised.name}", escape(breach), soft_wrap=True)


def _promise(expect: str | None, backend: str, options: Options) -> Association | None:
    if expect is None:
        return options.order if "detcomm" in backend else None
    if expect not in NAMES:
        raise UsageError(f"--expect: expected one of {', '.join(NAMES)}, got {expect!r}")
    return Association(expect, options.ring_chunk_elems)
