# SPDX-License-Identifier: Apache-2.0
"""The command line of labs; knows how to ask and to print, and nothing of how labs work.

scripts/netlab up 4
scripts/netlab torchrun 2,2 -m detcomm verify --quick
scripts/netlab shake --delay 3 --jitter 2 --loss 1
scripts/netlab cut 1
scripts/netlab heal
scripts/netlab down
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tests.netlab import jobs
from tests.netlab.isolation import LabError
from tests.netlab.lab import Lab, is_up, remove

_REST = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Several nodes on this machine, of network namespaces, with links that can be shaken and cut.",
    epilog="docs/multinode.md has examples.",
)

LabOption = Annotated[str, typer.Option("--lab", envvar="NETLAB", help="The lab's name; labs do not see one another.")]
NodesOption = Annotated[str, typer.Option(help="Which nodes, a list, in the order of their ranks; default: 0,1,...")]
LayoutArgument = Annotated[str, typer.Argument(help="Ranks of each node, a list: 4,4 or 3,5.")]
NodeArgument = Annotated[int, typer.Argument(help="Its number, from 0.")]


def main() -> None:
    """Run the command line; a lab's refusals are one line and exit code 2."""
    try:
        app(prog_name="scripts/netlab")
    except LabError as error:
        print(f"netlab: {error}", file=sys.stderr)
        sys.exit(2)


@app.command()
def up(nodes: Annotated[int, typer.Argument(help="How many, up to 8.")], lab: LabOption = "lab") -> None:
    """Make a lab that lasts until `down`."""
    made = Lab.up(nodes, _folder(lab), outlives_caller=True)
    for node in made.nodes:
        print(f"{node.name}  {node.address}")


@app.command(context_settings=_REST)
def exec(context: typer.Context, node: NodeArgument, lab: LabOption = "lab") -> None:
    """Run a command on a node, in this folder and with these variables."""
    _exit(_open(lab).start(node, _command(context), stdin=0).wait())


@app.command(context_settings=_REST)
def torchrun(context: typer.Context, layout: LayoutArgument, nodes: NodesOption = "", lab: LabOption = "lab") -> None:
    """Run a Python program with torchrun over several nodes."""
    _exit(jobs.torchrun(_open(lab), _numbers(layout), _command(context), nodes=_numbers(nodes) or None))


@app.command(context_settings=_REST)
def mpirun(context: typer.Context, layout: LayoutArgument, nodes: NodesOption = "", lab: LabOption = "lab") -> None:
    """Run a command with MPICH's mpirun over several nodes."""
    _exit(jobs.mpirun(_open(lab), _numbers(layout), _command(context), nodes=_numbers(nodes) or None))


@app.command()
def shake(
    delay: Annotated[float, typer.Option(help="Milliseconds, one way.")] = 0.0,
    jitter: Annotated[float, typer.Option(help="Milliseconds by which the delay varies, both ways.")] = 0.0,
    loss: Annotated[float, typer.Option(help="Per cent of the frames.")] = 0.0,
    lab: LabOption = "lab",
) -> None:
    """Delay, reorder and lose frames between nodes."""
    _open(lab).shake(delay, jitter, loss)


@app.command()
def cut(node: NodeArgument, lab: LabOption = "lab") -> None:
    """Pull a node's cable: its interface stays up, its frames go nowhere."""
    _open(lab).cut(node)


@app.command()
def heal(
    node: Annotated[int | None, typer.Argument(help="Its number; default: mend everything, calm the links.")] = None,
    lab: LabOption = "lab",
) -> None:
    """Plug a node's cable in."""
    _open(lab).heal(node)


@app.command()
def status(lab: LabOption = "lab") -> None:
    """Print the nodes and the state of the links."""
    told = _open(lab).describe()
    for number, node in enumerate(told["nodes"]):
        print(f"{node['name']}  {node['address']}{'  cut off' if number in told['cut'] else ''}")
    print("links: shaken" if told["shaken"] else "links: calm")


@app.command()
def down(lab: LabOption = "lab") -> None:
    """End everything that runs in a lab and remove it; one that has crashed, too."""
    folder = _folder(lab)
    if is_up(folder):
        Lab(folder).down()
    else:
        remove(folder)


def _folder(name: str) -> Path:
    if not name or not all(letter.isalnum() or letter in "-_" for letter in name):
        raise LabError(f"--lab: expected letters, digits, - and _, got {name!r}")
    return Path(tempfile.gettempdir()) / f"netlab-{os.getuid()}" / name


def _open(name: str) -> Lab:
    folder = _folder(name)
    if not is_up(folder):
        raise LabError(f"lab {name!r} is not up: scripts/netlab up N")
    return Lab(folder)


def _command(context: typer.Context) -> list[str]:
    if not context.args:
        raise LabError("a command is missing")
    return context.args


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise LabError(f"expected whole numbers with commas between, got {text!r}") from None


def _exit(code: int) -> None:
    raise typer.Exit(code)
