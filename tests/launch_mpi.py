# SPDX-License-Identifier: Apache-2.0
"""Ranks of an MPI job for tests: one ``mpirun`` for many cases, since each start imports torch anew.

    results = launch_mpi.run(4, function, *args)        # function(rank, world_size, *args) on every rank

The counterpart of ``tests/launch.py``; started as a program by ``mpirun``, this file is also what a rank runs.
"""

import importlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.launch import RankFailure

TIMEOUT_S = 240.0

# What a launcher or an outer rank may have set, and an MPI rank must find out from MPI.
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def mpirun() -> str:
    """The launcher that belongs to this Python's MPI; skips the test where there is none."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("mpirun is not installed")
    return found


def run(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """Run ``function(rank, world_size, *args)`` on each rank of a new MPI job and return the results by rank.

    Raises:
        RankFailure: the job failed or did not end in time; the text holds its output.
    """
    with tempfile.TemporaryDirectory(prefix="detcomm-mpi-") as folder:
        (Path(folder) / "arguments").write_bytes(pickle.dumps(args))
        command = [mpirun(), "-n", str(world_size), sys.executable, "-m", __name__]
        exit_code, output = run_command(
            [*command, function.__module__, function.__qualname__, folder], env=env, timeout_s=timeout_s
        )
        results = [Path(folder) / f"result{rank}" for rank in range(world_size)]
        if exit_code or not all(path.exists() for path in results):
            raise RankFailure(f"mpirun of {function.__name__} on {world_size} ranks: exit code {exit_code}\n{output}")
        return [pickle.loads(path.read_bytes()) for path in results]


def run_command(
    command: list[str], *, env: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> tuple[int, str]:
    """Run a launcher of ranks from the repository's root: its exit code, and its output with the errors among it.

    The command has a process group of its own, which is killed at the limit.

    Raises:
        RankFailure: it did not end in time.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _RENDEZVOUS}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **(env or {})}
    process = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[1],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise RankFailure(f"{' '.join(command)}: not done within {timeout_s:g} s\n{output}") from None
    return process.returncode, output


def _main(module: str, name: str, folder: str) -> None:
    from mpi4py import MPI

    rank, world_size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    try:
        function = getattr(importlib.import_module(module), name)
        result = function(rank, world_size, *pickle.loads((Path(folder) / "arguments").read_bytes()))
        (Path(folder) / f"result{rank}").write_bytes(pickle.dumps(result))
    except BaseException:
        print(f"rank {rank} of {world_size} raised\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)  # the others may wait for this rank


if __name__ == "__main__":
    _main(*sys.argv[1:])
