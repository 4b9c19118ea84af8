# SPDX-License-Identifier: Apache-2.0
"""How a command that needs several ranks gets them: from its launcher, or by starting them itself.

    torchrun --nproc-per-node 4 -m detcomm verify
    mpirun -n 4 python -m detcomm verify
    srun -n 4 python -m detcomm verify
    detcomm verify --nproc 4

With ``--nproc`` the command runs itself again, once a rank. The first rank that fails ends the others, and its exit
code is the command's. A rank ends when its starter is gone: its standard input is a pipe that only the starter holds.

Knows nothing of what the ranks do.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from detcomm.errors import UsageError

NprocOption = Annotated[int | None, typer.Option(min=1, help="Start this many ranks here, without a launcher.")]

_STARTED_BY = "DETCOMM_STARTED_BY"
"""How a rank was started by another ``detcomm``: directly, or through ``mpirun``, which gives rank 0 alone an input."""

_DIRECTLY, _MPIRUN = "detcomm", "mpirun"

GRACE_S = 10.0
"""How long the other ranks may take to end after the first one failed."""

INTERRUPTED = 130
"""The exit code of a command that was interrupted, as shells have it."""


@dataclass(frozen=True)
class Place:
    """One rank among those that run a command together."""

    rank: int
    world_size: int

    @property
    def speaks(self) -> bool:
        """Whether this rank prints, shows progress and writes files."""
        return self.rank == 0


def take_place(nproc: int | None, *, over_mpi: bool = False) -> Place:
    """This process's place among the ranks. Without a launcher, starts ``nproc`` ranks and exits with their outcome.

    Args:
        nproc: what ``--nproc`` says.
        over_mpi: whether ranks must be started by ``mpirun``, since they speak MPI with one another.

    Raises:
        UsageError: there is no launcher and no ``--nproc``, or the two disagree, or there is no ``mpirun``.
    """
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    started_by = os.environ.pop(_STARTED_BY, None)
    if started_by == _DIRECTLY or (started_by == _MPIRUN and rank == "0"):
        _end_with_standard_input()
    if rank.isdigit() and world_size.isdigit():
        if nproc is not None and nproc != int(world_size):
            raise UsageError(f"--nproc: the launcher has started {world_size} ranks, --nproc says {nproc}")
        return Place(int(rank), int(world_size))
    if nproc is None:
        raise UsageError("this command needs ranks: give --nproc N, or run it under torchrun, mpirun or srun")
    own_command = [sys.executable, "-m", "detcomm", *sys.argv[1:]]
    if over_mpi:
        sys.exit(run([[_mpirun(), "-n", str(nproc), *own_command]], [{_STARTED_BY: _MPIRUN}]))
    with _served_store() as port:
        code = run([own_command] * nproc, [_environment(rank, nproc, port) for rank in range(nproc)])
    sys.exit(code)


def run(commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]]) -> int:
    """Run processes until all have ended or the first has failed, then return that one's exit code.

    What rank 0 prints goes through. Of the others, only the errors of the one that failed first are shown.
    """
    with ExitStack() as stack:
        processes = [
            _start(stack, index, command, environment)
            for index, (command, environment) in enumerate(zip(commands, environments, strict=True))
        ]
        errors = [process.errors for process in processes]
        try:
            code, failed = _wait([process.handle for process in processes])
        except KeyboardInterrupt:
            return INTERRUPTED
    if failed is not None and (text := errors[failed]) is not None:
        sys.stderr.write(f"rank {failed} of {len(commands)}:\n{text[-1] if text else ''}")
    return code


@dataclass(frozen=True)
class _Process:
    handle: "subprocess.Popen[bytes]"
    errors: list[str] | None


def _start(stack: ExitStack, index: int, command: Sequence[str], environment: dict[str, str]) -> _Process:
    """One process, ended and its errors read when ``stack`` closes."""
    errors: list[str] | None = None if index == 0 else []
    file: IO[Any] | None = None
    if errors is not None:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the stack
        stack.callback(file.close)
        stack.callback(_read_tail, file, errors)
    handle = subprocess.Popen(
        command,
        env={"OMP_NUM_THREADS": "1"} | os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=None if index == 0 else subprocess.DEVNULL,
        stderr=file,
        start_new_session=True,  # Ctrl-C reaches the starter alone, which then ends the ranks
    )
    stack.callback(_end, handle)
    return _Process(handle, errors)


def _wait(processes: "Sequence[subprocess.Popen[bytes]]") -> tuple[int, int | None]:
    """The exit code of the first that fails, and which it was; 0 and ``None`` if none does."""
    failed: tuple[int, int] | None = None
    deadline = float("inf")
    while None in [process.poll() for process in processes] and time.monotonic() < deadline:
        if failed is None and (failed := _first_failure(processes)) is not None:
            deadline = time.monotonic() + GRACE_S
        time.sleep(0.02)
    failed = failed or _first_failure(processes)
    return failed or (0, None)


def _first_failure(processes: "Sequence[subprocess.Popen[bytes]]") -> tuple[int, int] | None:
    for index, process in enumerate(processes):
        if process.returncode:
            code = process.returncode
            return (128 - code if code < 0 else code), index
    return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it has started, however it fares."""
    if process.stdin is not None:
        process.stdin.close()
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _read_tail(file: IO[Any], errors: list[str]) -> None:
    file.seek(0)
    errors.append(file.read().decode(errors="replace")[-8000:])


def _end_with_standard_input() -> None:
    """End this process as soon as its starter is gone."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(INTERRUPTED)

    threading.Thread(target=watch, name="detcomm-starter", daemon=True).start()


@contextmanager
def _served_store() -> Iterator[int]:
    """Serves the rendezvous at a free port, as torchrun's agent does; gives the port."""
    try:
        from torch.distributed import TCPStore
    except ImportError:
        raise UsageError("this command needs torch: pip install torch") from None
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield int(server.port)
    del server


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's word for: the store is served already
        _STARTED_BY: _DIRECTLY,
    }


def _mpirun() -> str:
    """The launcher that belongs to this Python's MPI."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise UsageError("--nproc over MPI needs mpirun, which was not found; pip install mpich, or load an MPI module")
    return found
