# SPDX-License-Identifier: Apache-2.0
"""Jobs over the nodes of a lab, as users start them: torchrun on each node, mpirun on the first.

A *layout* is the number of ranks on each node; the nodes come in the order given, so that the first need not be node 0.
Knows nothing of what the ranks do.
"""

import os
import selectors
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.netlab.isolation import LabError
from tests.netlab.lab import ROOT, Command, Lab
from tests.netlab.remote_shell import FOLDER_VARIABLE

PORT = 29500
"""Of torchrun's rendezvous. A lab's network is its own, so a fixed port meets nobody else's."""

GRACE_S = 30.0
"""How long the other nodes may take to end after one has failed."""

_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def torchrun(
    lab: Lab,
    layout: Sequence[int],
    command: Sequence[str],
    *,
    nodes: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
    output: int = 1,
    timeout_s: float | None = None,
) -> int:
    """Run a Python program with torchrun on several nodes: the first exit code that is not 0.

    Args:
        layout: ranks of each node.
        command: as torchrun takes it: ``program.py arguments``, or ``-m module arguments``.
        nodes: which nodes, in the order of their ranks; default: the first ones.
        output: where everything that is printed goes.

    Raises:
        TimeoutError: it was not done in time, and has been ended.
    """
    nodes = _nodes(lab, layout, nodes)
    master = lab.nodes[nodes[0]].name
    agent = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(layout)}"]
    agent += [f"--master-addr={master}", f"--master-port={PORT}"]
    running = [
        lab.start(
            node,
            [*agent, f"--node-rank={index}", f"--nproc-per-node={layout[index]}", *command],
            environment=_environment(environment),
            stdout=output,
            stderr=output,
        )
        for index, node in enumerate(nodes)
    ]
    return _wait_for_all(running, timeout_s)


def mpirun(
    lab: Lab,
    layout: Sequence[int],
    command: Sequence[str],
    *,
    nodes: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
    output: int = 1,
    timeout_s: float | None = None,
) -> int:
    """Run a command with MPICH's mpirun, started on the first node; other nodes are reached as by ssh.

    Arguments, result and errors as for ``torchrun``, but for the command, which is any.
    """
    nodes = _nodes(lab, layout, nodes)
    names = lab.nodes
    hosts = ",".join(f"{names[node].name}:{count}" for node, count in zip(nodes, layout, strict=True))
    launcher = [_mpirun(), "-launcher", "ssh", "-launcher-exec", str(ROOT / "tests/netlab/ssh"), "-hosts", hosts]
    values = _environment(environment) | {FOLDER_VARIABLE: str(lab.folder), "NETLAB_PYTHON": sys.executable}
    running = lab.start(
        nodes[0],
        [*launcher, "-n", str(sum(layout)), *command],
        environment=values,
        stdout=output,
        stderr=output,
    )
    return _wait_for_all([running], timeout_s)


def _nodes(lab: Lab, layout: Sequence[int], nodes: Sequence[int] | None) -> Sequence[int]:
    chosen = range(len(layout)) if nodes is None else nodes
    there = len(lab.nodes)
    if len(chosen) != len(layout) or len(set(chosen)) < len(chosen) or any(not 0 <= node < there for node in chosen):
        raise LabError(f"expected {len(layout)} different nodes below {there}, got {list(chosen)}")
    if not layout or min(layout) < 1:
        raise LabError(f"expected at least one rank on each node, got {list(layout)}")
    return chosen


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    """The caller's variables without those of a job that it may be in."""
    own = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    return {"OMP_NUM_THREADS": "1"} | own | dict(more or {})


def _wait_for_all(commands: Sequence[Command], timeout_s: float | None) -> int:
    """The first exit code that is not 0; the other commands have ended too, or are ended after a grace."""
    deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    code = 0
    with selectors.DefaultSelector() as selector:
        for command in commands:
            selector.register(command, selectors.EVENT_READ)
        try:
            while waiting := list(selector.get_map()):
                left_s = deadline - time.monotonic()
                ready = selector.select(None if left_s == float("inf") else max(0.0, left_s))
                if not ready and code:
                    break
                if not ready:
                    raise TimeoutError(f"{len(waiting)} of {len(commands)} nodes were not done in {timeout_s} s")
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    ended: Command = key.fileobj  # type: ignore[assignment]
                    if (own := ended.wait()) and not code:
                        code = own
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        finally:
            for key in list(selector.get_map().values()):
                key.fileobj.end()  # type: ignore[union-attr]
    return code


def _mpirun() -> str:
    """MPICH's launcher that belongs to this Python, or the one on the path."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise LabError("mpirun is not installed: pip install mpich")
    return found
