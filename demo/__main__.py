# SPDX-License-Identifier: Apache-2.0
"""Train six times, show the hashes of the weights side by side, and fail unless they are as detcomm promises.

What it shows for stock gloo is that another bucket size trains other weights. It claims nothing else about gloo: its
hash happens not to change with the order of the ranks here, and never in the first step, for which DDP uses the same
buckets.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from demo import ranks
from demo.training import Setting, Trained

NUM_STEPS = 60
SETTINGS = (
    Setting("gloo", 25),
    Setting("gloo", 0.25),
    Setting("detcomm", 25),
    Setting("detcomm", 0.25),
    Setting("detcomm", 25, ranks=(2, 0, 3, 1), remark="ranks dealt to processes in another order"),
    Setting(
        "detcomm",
        0.25,
        environment={"DETCOMM_TRANSPORT": "gloo", "DETCOMM_SCHEDULE": "halving"},
        remark="over TCP, recursive halving",
    ),
)


@dataclass(frozen=True)
class Outcome:
    """One run: what all ranks have, and how many parameters differ from the backend's first run, by step."""

    setting: Setting
    trained: Trained
    differing: tuple[int, ...]
    num_parameters: int
    seconds: float


def main() -> int:
    """Run everything; 0 if gloo's two weights differ and all of detcomm's are the same bits."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="training steps of each run")
    parser.add_argument("--markdown", type=Path, help="write the table into this file, as the README has it")
    parser.add_argument("--picture", type=Path, help="draw the differences into this PNG (needs matplotlib)")
    arguments = parser.parse_args()
    console = Console()
    outcomes = _run_all(console, arguments.steps)
    console.print(_table(outcomes))
    if arguments.markdown is not None:
        arguments.markdown.write_text(_markdown(outcomes))
    if arguments.picture is not None:
        from demo import picture

        picture.draw(outcomes, arguments.picture)
    return _verdict(console, outcomes)


def _run_all(console: Console, num_steps: int) -> list[Outcome]:
    outcomes: list[Outcome] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(prefix="detcomm-demo-") as folder, Progress(*columns, console=console) as bars:
        for index, setting in enumerate(SETTINGS):
            task = bars.add_task(setting.name, total=num_steps)
            file = Path(folder) / f"weights{index}"
            first = Path(folder) / f"weights{[other.backend for other in SETTINGS].index(setting.backend)}"
            outcomes.append(_run_one(setting, num_steps, file, first, bars, task))
            if file != first:
                file.unlink()
    return outcomes


def _run_one(setting: Setting, num_steps: int, file: Path, first: Path, bars: Progress, task: TaskID) -> Outcome:
    def report(step: int, loss: float) -> None:
        bars.update(task, completed=step, description=f"{setting.name}: loss {loss:.4f}")

    start = time.monotonic()
    trained = ranks.run(setting, num_steps, file, report)
    if not bars.console.is_terminal:
        bars.console.print(f"{setting.name}: loss {trained[0].losses[-1]:.4f}, {time.monotonic() - start:.0f} s")
    if len({each.weights for each in trained}) != 1:
        raise ranks.RunFailure(f"{setting.name}: the ranks have different weights at the end")
    weights, reference = _read(file, num_steps), _read(first, num_steps)
    differing = tuple(int(count) for count in (weights != reference).sum(axis=1))
    return Outcome(setting, trained[0], differing, weights.shape[1], time.monotonic() - start)


def _read(file: Path, num_steps: int) -> NDArray[np.uint32]:
    """The bits of all parameters after each step, ``[steps, parameters]``."""
    return np.memmap(file, dtype=np.uint32, mode="r").reshape(num_steps, -1)


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(title="The same training", title_justify="left")
    table.add_column("run")
    for heading in ("last loss", "SHA-256 of weights", "other bits in"):
        table.add_column(heading, no_wrap=True)
    for outcome in outcomes:
        differing, total = outcome.differing[-1], outcome.num_parameters
        table.add_row(
            outcome.setting.name,
            f"{outcome.trained.losses[-1]:.4f}",
            outcome.trained.weights[:16],
            f"[{'red' if differing else 'green'}]{differing:,} of {total:,}",
            end_section=outcome is outcomes[1],
        )
    return table


def _markdown(outcomes: list[Outcome]) -> str:
    """The table of README.md: a backend's first run is what its others are compared with."""
    lines = ["| run | last loss | SHA-256 of the weights | parameters with other bits |", "|---|---|---|---|"]
    told: set[str] = set()
    for outcome in outcomes:
        others = f"{outcome.differing[-1]:,}" if outcome.setting.backend in told else ""
        if outcome.differing[-1]:
            others += f" of {outcome.num_parameters:,}"
        told.add(outcome.setting.backend)
        loss, weights = outcome.trained.losses[-1], outcome.trained.weights[:16]
        lines.append(f"| {outcome.setting.name} | {loss:.4f} | `{weights}…` | {others} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def _verdict(console: Console, outcomes: list[Outcome]) -> int:
    hashes = {
        backend: {each.trained.weights for each in outcomes if each.setting.backend == backend}
        for backend in ("gloo", "detcomm")
    }
    passed = True
    if len(hashes["detcomm"]) != 1:
        console.print("[red]FAILED:[/] detcomm's runs have different weights")
        passed = False
    if len(hashes["gloo"]) < 2:
        console.print("[red]FAILED:[/] gloo's runs have the same weights: this training shows nothing")
        passed = False
    if passed:
        console.print("gloo: another bucket size, other weights. detcomm: one set of bits, however it is run.")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
