# SPDX-License-Identifier: Apache-2.0
"""What one rank of ``tests/launch.py`` runs: it takes functions from a pipe, runs them and sends back results.

Everything that it prints goes to a file of its own, and so do its stacks, when it crashes or is asked for them.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

HOST_STORE = "host the store"
"""In place of a job: serve the rendezvous store from here and answer its port."""

_STACKS_SIGNAL = signal.SIGUSR1


def main(pipe: Connection, output: str) -> None:
    """Work until the launcher closes its end."""
    _redirect_output(output)
    faulthandler.enable(all_threads=True)
    faulthandler.register(_STACKS_SIGNAL, all_threads=True)
    served = []  # held: a store ends with its object
    while True:
        try:
            job = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        if job == HOST_STORE:
            served.append(_serve_store())
            pipe.send(served[-1].port)
            continue
        _send(pipe, *_work(job))
    sys.stdout.flush()


def request_stacks(pid: int | None) -> None:
    """Ask a rank to write the stacks of all its threads to its output; a stopped one is woken for it."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, _STACKS_SIGNAL)


def _work(job: tuple[Any, tuple[Any, ...], Mapping[str, str | None]]) -> tuple[bool, Any]:
    function, args, environment = job
    with _variables(environment):
        try:
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            return True, function(rank, world_size, *args)
        except BaseException:
            return False, "raised\n" + traceback.format_exc()


def _send(pipe: Connection, succeeded: bool, value: Any) -> None:
    try:
        pipe.send((succeeded, value))
    except BrokenPipeError:
        pass  # the launcher has given up on this run
    except Exception:
        pipe.send((False, f"returned {type(value).__name__}, which cannot be pickled\n{traceback.format_exc()}"))


@contextlib.contextmanager
def _variables(environment: Mapping[str, str | None]) -> Iterator[None]:
    before = dict(os.environ)
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _redirect_output(path: str) -> None:
    """Send what Python and native code print to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _serve_store() -> Any:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, None, True, timedelta(minutes=5), wait_for_workers=False)
