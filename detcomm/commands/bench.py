# SPDX-License-Identifier: Apache-2.0
"""``detcomm bench``: how fast, against other libraries in the same processes, interleaved. On CPU tensors."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from detcomm.collectives import Collective
from detcomm.commands import lists
from detcomm.commands.ranks import JsonOption, NprocOption, take_place
from detcomm.errors import UsageError

if TYPE_CHECKING:  # needs torch, which the command line does without until a command does not
    from detcomm.bench import Report

_WIDTH = 120
"""Columns of the output where it does not go to a terminal."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def bench_command(
    nproc: NprocOption = None,
    against: Annotated[str, typer.Option(help="gloo, native, mpi or other backends of torch, a list.")] = "gloo",
    collectives: Annotated[str, typer.Option(help="A list.")] = "all_reduce,reduce_scatter,all_gather",
    dtypes: Annotated[str, typer.Option(help="Element types, a list.")] = "float32",
    sizes: Annotated[str, typer.Option(help="Bytes of the whole message, a list: 4K,1M,64M.")] = "4K,64K,1M,16M,64M",
    rounds: Annotated[int, typer.Option(min=3, help="Turns of each contender.")] = 9,
    turn_s: Annotated[float, typer.Option(min=0.0, help="About how long a turn takes.")] = 0.1,
    json_file: JsonOption = None,
) -> None:
    """Time collectives of detcomm and of others, in turns; every result is checked before it is timed.

    Times are medians over the rounds of the slowest rank's time for a call; algbw and busbw are as nccl-tests define
    them; "times slower" is the median over the rounds of the ratio to detcomm.
    """
    names = ["detcomm", *(name for name in lists.split(against) if name != "detcomm")]
    place = take_place(nproc, over_mpi="mpi" in names)
    if place.world_size < 2:
        raise UsageError("bench needs at least two ranks")
    import torch.distributed as dist

    from detcomm.bench import Case, Effort, Report, measure, open_contender

    cases = [
        Case(collective, dtype, size)
        for collective in _to_collectives(collectives)
        for dtype in lists.to_dtypes(dtypes, "--dtypes")
        for size in _to_bytes(sizes)
    ]
    dist.init_process_group("gloo")
    contenders = [open_contender(name) for name in names]
    with Console(stderr=True, quiet=not place.speaks).status("measuring"):
        report = Report(place.world_size, "detcomm", measure(cases, contenders, Effort(rounds, turn_s)))
    for contender in contenders:
        contender.close()
    dist.destroy_process_group()
    if place.speaks:
        _show(Console(width=None if sys.stdout.isatty() else _WIDTH), report)
        if json_file is not None:
            json_file.write_text(json.dumps(report.to_json(), indent=1) + "\n")


def _show(console: Console, report: "Report") -> None:
    machine = report.machine
    console.print(
        f"{report.world_size} ranks on {machine['cores']} cores of {machine['processor']}, "
        f"load average {machine['load_average_1min']}"
    )
    table = Table("collective", "dtype", box=None)
    for name in ("bytes", "contender", "time us", "algbw", "busbw", "times slower"):
        table.add_column(name, justify="left" if name == "contender" else "right")
    for row in report.rows():
        table.add_row(
            row["collective"],
            row["dtype"],
            str(row["bytes"]),
            row["contender"],
            f"{row['median_us']:.1f}",
            f"{row['algbw']:.3f}",
            f"{row['busbw']:.3f}",
            f"{row['times_slower']:.2f}" if "times_slower" in row else "",
        )
    console.print(table)
    for refusal in report.refusals():
        console.print(f"not measured: {refusal}")


def _to_collectives(text: str) -> list[Collective]:
    known = {collective.value: collective for collective in Collective}
    names = lists.split(text)
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"--collectives: expected some of {', '.join(known)}, got {unknown[0]!r}")
    return [known[name] for name in names]


def _to_bytes(text: str) -> list[int]:
    sizes = []
    for word in lists.split(text):
        unit = word[-1:].upper() if word[-1:].upper() in _UNITS and not word[-1:].isdigit() else ""
        number = word[: len(word) - len(unit)]
        if not number.isdigit():
            raise UsageError(f"--sizes: expected bytes such as 4K, 1M or 65536, got {word!r}")
        sizes.append(int(number) * _UNITS[unit])
    return sizes
