# SPDX-License-Identifier: Apache-2.0
"""``detcomm golden``: record what a training command computes, and check a run against a reference."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import attrs
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from detcomm.commands.output_files import JsonOption
from detcomm.commands.ranks import INTERRUPTED
from detcomm.errors import UsageError
from detcomm.golden.compare import Comparison, compare
from detcomm.golden.file import FILE_VARIABLE, PARTIAL_SUFFIX, GoldenRun, read

_ROWS = 20
"""Differences that are shown; ``--json`` has all."""

_WIDTH = 110
"""Columns of the output where it does not go to a terminal."""

golden_app = typer.Typer(no_args_is_help=True, help="Record a golden run, and check a run against it.")


@golden_app.command("record", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def record_command(
    command: Annotated[list[str], typer.Argument(help="A training command that has a detcomm.golden.Recorder.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("run.golden"),
) -> None:
    """Run a training command and keep what its recorder writes.

    Exits as the command does, and with 2 if nothing was recorded.
    """
    out = out.absolute()
    partial = out.with_name(out.name + PARTIAL_SUFFIX)
    if not out.parent.is_dir():
        raise UsageError(f"--out: there is no folder {out.parent}")
    partial.unlink(missing_ok=True)
    before = _identity(out)
    code = _run(command, out)
    if _identity(out) != before:
        run = read(out)
        numerics = ", ".join(run.environment["numerics"]) or "no reductions"
        world_size = run.environment["world_size"]
        print(f"detcomm: {len(run.steps)} steps of {world_size} ranks ({numerics}) in {out}", file=sys.stderr)
    elif partial.exists():
        why = "the command failed" if code else "the recorder was never closed"
        print(f"detcomm: {why}; what it recorded until then is in {partial}", file=sys.stderr)
        code = code or 2
    elif code == 0:
        raise UsageError(f"nothing was recorded: the command {command[0]} made no step of a detcomm.golden.Recorder")
    raise typer.Exit(code)


@golden_app.command("check")
def check_command(
    reference: Annotated[Path, typer.Argument(metavar="REF", help="The file of the golden run.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The file of the run to check.")],
    common_steps: Annotated[
        bool, typer.Option("--common-steps", help="Only steps that both have, as after a restart.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Compare though numerics or world sizes differ.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Compare two golden runs; name the first step and tensor that differ.

    Exits with 0 if all is equal, with 1 if not, with 2 if the files cannot be compared.
    """
    expected, got = read(reference), read(run)
    comparison = compare(expected, got, common_steps=common_steps, force=force)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    _show(console, comparison)
    for path, each in ((reference, expected), (run, got)):
        if not each.complete:
            console.print(f"[yellow]{escape(str(path))} ends before its run did, after step {_last(each)}[/yellow]")
    if json_file is not None:
        content = {"reference": str(reference), "run": str(run), "equal": comparison.equal} | attrs.asdict(comparison)
        json_file.write_text(json.dumps(content, indent=1) + "\n")
    if not comparison.equal:
        raise typer.Exit(1)


def _show(console: Console, comparison: Comparison) -> None:
    if comparison.settings:
        table = Table("", "expected", "got", title="other environment", title_justify="left")
        for setting in comparison.settings:
            table.add_row(*(escape(str(each)) for each in (setting.name, setting.expected, setting.got)))
        console.print(table)
    extent = f"{comparison.num_steps} steps, {comparison.num_compared} comparisons"
    if comparison.equal:
        console.print(f"[green]equal[/green]: {extent}")
        return
    first = comparison.differences[0]
    of_first = [each for each in comparison.differences if each.step == first.step]
    table = Table("", "expected", "got", title=f"step {first.step}", title_justify="left")
    for each in of_first[:_ROWS]:
        table.add_row(*(escape(text) for text in (each.what, each.expected, each.got)))
    console.print(table)
    if len(of_first) > _ROWS:
        console.print(f"and {len(of_first) - _ROWS} more of this step")
    num_steps = len({each.step for each in comparison.differences})
    console.print(f"{extent}, {len(comparison.differences)} differences in {num_steps} steps")
    console.print(
        f"DIFFERS first at step {first.step}: {first.what}: expected {first.expected}, got {first.got}",
        style="red",
        markup=False,
        soft_wrap=True,
    )


def _run(command: list[str], out: Path) -> int:
    """Run a command with the recorder's variable set; an exit code as shells have it. Passes SIGTERM on."""
    try:
        process = subprocess.Popen(command, env=os.environ | {FILE_VARIABLE: str(out)})
    except OSError as error:
        raise UsageError(f"{command[0]}: {error.strerror}") from None

    def pass_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    previous = signal.signal(signal.SIGTERM, pass_on)
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the command has got it too, and ends as it likes
        process.wait()
        code = INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 128 - code if code < 0 else code


def _identity(path: Path) -> tuple[int, int] | None:
    """Changes when the file is replaced."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _last(run: GoldenRun) -> int:
    return max(run.steps)
