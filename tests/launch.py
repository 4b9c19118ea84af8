# SPDX-License-Identifier: Apache-2.0
"""Ranks for tests: forked from a clean server, their results and failures brought back, nothing left behind.

    results = launch.run(4, function, *args)            # fresh ranks; function(rank, world_size, *args)

    with launch.Ranks(4) as ranks:                      # standing ranks, for many small cases
        results = ranks.run(function, *args)

``function`` lies at the top level of a module, and so can be pickled. On each rank ``init_process_group`` finds its
rendezvous in the environment, as under torchrun; every ``run`` has a fresh store. The first rank that fails is
the error, with its traceback; the others get a grace, then their stacks are printed and they are killed.

pytest itself never forks: a fork of a process whose libraries have started threads hangs later.
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, Self

from torch.distributed import TCPStore

from tests import rank_process

TIMEOUT_S = 180.0
GRACE_S = 20.0
"""How long ranks may take to end after another one failed; a loaded machine needs some seconds for it."""

RANKS_PER_HOST: int | None = None
"""So many neighbours say that they share a host, and that others are on another one; ``None``: all see the truth."""

Environment = Mapping[str, str | None]
"""Variables to set on a rank; ``None`` removes one."""


_PRELOADED = ["torch", "torch.distributed", "numpy", "attrs", "pytest", "hypothesis", "tests.rank_process"]


def preload(*modules: str) -> None:
    """Import ``modules`` in the server that ranks are forked from, for tests whose imports take seconds.

    Called by a test module when it is imported: so only in sessions that run its tests, and before the server starts.
    """
    _PRELOADED.extend(module for module in modules if module not in _PRELOADED)


class RankFailure(AssertionError):
    """A rank raised, died or did not finish; the text holds what is needed to find out why."""


@dataclass(frozen=True)
class Died:
    """In place of a result: the rank ended without one. A negative ``exit_code`` is a signal's number."""

    exit_code: int


@dataclass
class _Rank:
    process: BaseProcess
    pipe: Connection
    output: Path

    def read_output(self, num_lines: int = 60) -> str:
        lines = self.output.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])


def run(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    env: Environment | Sequence[Environment] | None = None,
    timeout_s: float = TIMEOUT_S,
    may_die: bool = False,
    store_host: Literal["launcher", "rank0"] = "launcher",
    daemon: bool = True,
) -> list[Any]:
    """Run ``function(rank, world_size, *args)`` on fresh ranks; see ``Ranks.run``."""
    with Ranks(world_size, store_host=store_host, daemon=daemon) as ranks:
        return ranks.run(function, *args, env=env, timeout_s=timeout_s, may_die=may_die)


class Ranks:
    """A standing set of ranks. Started at the first ``run``, and anew at the next one after a failure.

    Args:
        world_size: how many.
        store_host: who serves the rendezvous store: this process, as under torchrun, or rank 0, as under plain
            ``init_process_group``; then the store dies with rank 0.
        daemon: a rank ends with this process. Those that start processes of their own must not be daemons.
    """

    def __init__(
        self, world_size: int, *, store_host: Literal["launcher", "rank0"] = "launcher", daemon: bool = True
    ) -> None:
        self.world_size = world_size
        self._daemon = daemon
        self._store_host = store_host
        self._stores: list[TCPStore] = []
        self._ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="detcomm-ranks-")
        self._num_runs = 0
        self._port = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank; the ranks are started if need be."""
        self._start()
        return [rank.process.pid or 0 for rank in self._ranks]

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        env: Environment | Sequence[Environment] | None = None,
        timeout_s: float = TIMEOUT_S,
        may_die: bool = False,
        same_store: bool = False,
    ) -> list[Any]:
        """Run ``function(rank, world_size, *args)`` on every rank and return the results by rank.

        Args:
            env: variables for this run, the same for all ranks or one mapping for each.
            may_die: whether a rank may end without a result; ``Died`` stands for it then. The ranks that live
                are stopped after the run.
            same_store: keep to the store of the run before; for many small runs on a group that stands.

        Raises:
            RankFailure: a rank raised, died or did not finish in time.
        """
        self._start()
        self._num_runs += 1
        if not (same_store and self._port):
            self._port = self._new_store()
        for index, rank in enumerate(self._ranks):
            own = env[index] if isinstance(env, Sequence) else env or {}
            rank.pipe.send((function, args, self._environment(index) | dict(own)))
        results, failures = self._collect(timeout_s, may_die)
        if failures:
            text = self._report(failures)
            self._stop(patience_s=0.0)
            raise RankFailure(text)
        if any(isinstance(result, Died) for result in results.values()):
            self._stop()
        return [results[index] for index in range(self.world_size)]

    def close(self) -> None:
        """End the ranks; those that do not end by themselves are killed."""
        self._stop()
        self._folder.cleanup()

    def _environment(self, rank: int) -> dict[str, str | None]:
        host = {} if RANKS_PER_HOST is None else {"DETCOMM_HOST_ID": f"host{rank // RANKS_PER_HOST}"}
        return host | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's word for: the store is served already
        }

    def _start(self) -> None:
        if self._ranks:
            return
        context = _context()
        for index in range(self.world_size):
            ours, theirs = context.Pipe()
            output = Path(self._folder.name) / f"rank{index}-{self._num_runs}.txt"
            output.touch()
            process = context.Process(target=rank_process.main, args=(theirs, str(output)), daemon=self._daemon)
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, output))

    def _new_store(self) -> int:
        """Serve a store at a free port, until the ranks are stopped: groups may stand from run to run."""
        if self._store_host == "rank0":
            self._ranks[0].pipe.send(rank_process.HOST_STORE)
            return int(self._ranks[0].pipe.recv())
        store = TCPStore("127.0.0.1", 0, None, True, timedelta(minutes=5), wait_for_workers=False)
        self._stores.append(store)
        return int(store.port)

    def _collect(self, timeout_s: float, may_die: bool) -> tuple[dict[int, Any], dict[int, str]]:
        """Wait for all ranks; results, and failures in the order in which they came."""
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(enumerate(self._ranks))
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready = connection.wait([rank.pipe for rank in waiting.values()], timeout=left)
            for index, rank in list(waiting.items()):
                if rank.pipe not in ready:
                    continue
                del waiting[index]
                try:
                    succeeded, value = rank.pipe.recv()
                except (EOFError, ConnectionResetError):
                    rank.process.join(GRACE_S)
                    exit_code = rank.process.exitcode
                    succeeded, value = may_die, f"ended without a result, exit code {exit_code}"
                    if may_die:
                        value = Died(exit_code if exit_code is not None else 0)
                (results if succeeded else failures)[index] = value
                if not succeeded:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for index, rank in waiting.items():
            rank_process.request_stacks(rank.process.pid)
            failures[index] = f"had not finished (limit {timeout_s:g} s); its stacks are in its output"
        return results, failures

    def _report(self, failures: dict[int, str]) -> str:
        time.sleep(1.0)  # for the stacks that were asked for
        first, *others = failures
        lines = [f"rank {first} of {self.world_size}: {failures[first]}"]
        lines += [f"also rank {index}: {failures[index]}" for index in others]
        for index, rank in enumerate(self._ranks):
            if output := rank.read_output():
                lines += [f"--- output of rank {index}", output]
        return "\n".join(lines)

    def _stop(self, patience_s: float = 10.0) -> None:
        for rank in self._ranks:
            rank.pipe.close()  # an idle rank ends by itself
        deadline = time.monotonic() + patience_s
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
            if rank.process.is_alive() and rank.process.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it has ended this moment
                    os.kill(rank.process.pid, signal.SIGKILL)
                rank.process.join()
        self._ranks = []
        self._stores = []
        self._port = 0


def _context() -> ForkServerContext:
    """The fork server, with the slow imports done once.

    detcomm itself is not among them: tests set the variables that it reads at import.
    """
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context
