# SPDX-License-Identifier: Apache-2.0
"""Makes ranks on the nodes of a lab in milliseconds: forked from one process that has imported torch already.

Runs beside the lab's supervisor, from where all nodes can be entered. A line of its input is a job (see ``ranks.py``),
a line of its output the exit codes of the job's ranks, in rank order; 128 and the number for one that a signal ended.
It must not start threads: a forked child has only the one that forked.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs  # noqa: F401 - here are the slow imports of all ranks, but detcomm, which reads variables
import numpy  # noqa: F401
import torch.distributed  # noqa: F401

_NAMESPACES = ("net", "uts", "ipc", "pid_for_children", "mnt")
"""In this order: the last hides what the others are found by."""


def main() -> None:
    """Run jobs until the input ends."""
    print("ready", flush=True)
    for line in sys.stdin:
        children = [_fork(rank) for rank in json.loads(line)]
        print(json.dumps([_exit_code(os.waitpid(child, 0)[1]) for child in children]), flush=True)


def _fork(rank: Mapping[str, Any]) -> int:
    """Fork a child that enters a node and there forks a rank, in whose place it then ends."""
    if child := os.fork():
        return child
    try:
        _enter(rank["pid"])
        inner = os.fork()  # only children enter a namespace of processes
        if inner == 0:
            _be(rank["module"], rank["function"], Path(rank["folder"]), rank["environment"], rank["limit_s"])
        os._exit(_exit_code(os.waitpid(inner, 0)[1]))
    except BaseException:
        traceback.print_exc()
        os._exit(125)


def _enter(pid: int) -> None:
    """Join the namespaces of a node, given the process that has them."""
    libc = ctypes.CDLL(None, use_errno=True)
    files = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in _NAMESPACES]
    for file, name in zip(files, _NAMESPACES, strict=True):
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), f"cannot join {name} of process {pid}")
        os.close(file)


def _be(module: str, function: str, folder: Path, environment: Mapping[str, str], limit_s: float) -> None:
    """Be the rank; never returns."""
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = open(output, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.dump_traceback_later(limit_s, file=2, exit=True)
    os.environ.clear()
    os.environ.update(environment)
    code = 1
    try:
        arguments: Sequence[Any] = pickle.loads((folder / "arguments").read_bytes())
        result = getattr(importlib.import_module(module), function)(rank, world_size, *arguments)
        (folder / f"result{rank}.part").write_bytes(pickle.dumps(result))
        (folder / f"result{rank}.part").rename(folder / f"result{rank}")
        code = 0
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
