# SPDX-License-Identifier: Apache-2.0
"""The command line: one file a command, gathered here. Commands use public functions alone."""

import sys
from collections.abc import Callable
from typing import Any

import typer

from detcomm.commands import bench_train  # noqa: F401 - a command of bench
from detcomm.commands.bench import bench_app
from detcomm.commands.golden import golden_app
from detcomm.commands.plan import plan
from detcomm.commands.probe import probe_command
from detcomm.commands.verify import verify_command
from detcomm.errors import DetcommError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Collectives whose order of additions is specified.",
)


@app.callback()
def _commands() -> None:
    """Keeps each command a word of its own, also while there is one."""


_COMMANDS: dict[str, Callable[..., Any]] = {
    "plan": plan,
    "probe": probe_command,
    "verify": verify_command,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)
app.add_typer(bench_app, name="bench")
app.add_typer(golden_app, name="golden")


def main() -> None:
    """Run the command line. Status 1 is a claim that does not hold; an error of detcomm is one line and status 2."""
    try:
        app()
    except DetcommError as error:
        print(f"detcomm: {error}", file=sys.stderr)
        sys.exit(2)
