# SPDX-License-Identifier: Apache-2.0
"""Ranks on the nodes of a lab, for tests: what ``tests/launch.py`` is on one host.

    with NodeRanks(lab) as ranks:
        results = ranks.run([0, 0, 1], function, *args)     # rank 2 on node 1; function(rank, world_size, *args)

        job = ranks.start([0, 1], function)                 # and meanwhile, say, lab.cut(1)
        results = job.finish()

The variables are those of torchrun; rank 0 serves the store, as under plain ``init_process_group``.
"""

import json
import os
import pickle
import select
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.launch import Died, RankFailure
from tests.netlab.lab import ROOT, Lab

LIMIT_S = 240.0
_FIRST_PORT = 20000


class NodeRanks:
    """Makes ranks on the nodes of a lab."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._nodes = lab.nodes
        self._num_jobs = 0
        input, self._input = os.pipe()
        self._output, output = os.pipe()
        environment = dict(os.environ) | {"PYTHONFAULTHANDLER": "1"}
        command = [sys.executable, "-m", "tests.multinode.forker"]
        self._forker = lab.start(None, command, folder=ROOT, environment=environment, stdin=input, stdout=output)
        os.close(input)
        os.close(output)
        self._answers = os.fdopen(self._output)
        if self._answers.readline() != "ready\n":
            raise RankFailure("the process that makes ranks does not start")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._input)
        self._answers.close()
        self._forker.end()

    def run(
        self,
        placement: Sequence[int],
        function: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        may_die: bool = False,
        limit_s: float = LIMIT_S,
    ) -> list[Any]:
        """Run ``function(rank, world_size, *args)`` on each rank and return the results by rank; see ``start``."""
        return self.start(placement, function, *args, env=env, limit_s=limit_s).finish(may_die=may_die)

    def start(
        self,
        placement: Sequence[int],
        function: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        limit_s: float = LIMIT_S,
    ) -> "Job":
        """Start ranks; one job at a time.

        Args:
            placement: the node of each rank.
            function: lies at the top level of a module.
            env: further variables.
            limit_s: a rank that has not finished by then prints its stacks and ends.
        """
        self._num_jobs += 1
        job = Job(self, tempfile.TemporaryDirectory(prefix="detcomm-nodes-"), len(placement), limit_s)
        (job.folder / "arguments").write_bytes(pickle.dumps(args))
        base = dict(os.environ) | {"NODE_JOB_FOLDER": str(job.folder)} | dict(env or {})
        on_node: Counter[int] = Counter()
        ranks = []
        for rank, node in enumerate(placement):
            values = {
                "RANK": rank,
                "LOCAL_RANK": on_node[node],
                "WORLD_SIZE": len(placement),
                "LOCAL_WORLD_SIZE": placement.count(node),
                "MASTER_ADDR": self._nodes[placement[0]].name,
                "MASTER_PORT": _FIRST_PORT + self._num_jobs,
            }
            on_node[node] += 1
            ranks.append(
                {
                    "pid": self._nodes[node].pid,
                    "module": function.__module__,
                    "function": function.__qualname__,
                    "folder": str(job.folder),
                    "environment": base | {name: str(value) for name, value in values.items()},
                    "limit_s": limit_s,
                }
            )
        os.write(self._input, json.dumps(ranks).encode() + b"\n")
        return job

    @property
    def has_answered(self) -> bool:
        """Whether the job that runs has ended."""
        return bool(select.select([self._answers], [], [], 0)[0])

    def read_answer(self, timeout_s: float) -> list[int]:
        """The exit codes of the job that runs.

        Raises:
            RankFailure: the forker has gone, or is silent.
        """
        if not select.select([self._answers], [], [], timeout_s)[0]:
            raise RankFailure(f"ranks did not end within {timeout_s:g} s, though they end themselves earlier")
        line = self._answers.readline()
        if not line:
            raise RankFailure("the process that makes ranks has ended")
        codes: list[int] = json.loads(line)
        return codes


class Job:
    """Ranks that run."""

    def __init__(
        self, ranks: NodeRanks, folder: "tempfile.TemporaryDirectory[str]", world_size: int, limit_s: float
    ) -> None:
        self.folder = Path(folder.name)
        self._temporary = folder
        self._ranks = ranks
        self.world_size = world_size
        self._limit_s = limit_s

    def wait_for_file(self, name: str, timeout_s: float = LIMIT_S) -> None:
        """Wait until a rank has written a file into the job's folder, which it finds in ``NODE_JOB_FOLDER``."""
        deadline = time.monotonic() + timeout_s
        while not (self.folder / name).exists():
            if self._ranks.has_answered or time.monotonic() > deadline:
                raise RankFailure(f"no rank has written {name}, in {timeout_s:g} s or at all\n{self._read_output()}")
            time.sleep(0.01)

    def finish(self, *, may_die: bool = False) -> list[Any]:
        """Wait for all ranks: their results; ``Died`` for one that ended without, where that may be.

        Raises:
            RankFailure: a rank raised, died or did not finish; with what all printed.
        """
        with self._temporary:
            codes = self._ranks.read_answer(self._limit_s + 30.0)
            results: list[Any] = []
            for rank, code in enumerate(codes):
                result = self.folder / f"result{rank}"
                if result.exists():
                    results.append(pickle.loads(result.read_bytes()))
                elif may_die and code > 128:
                    results.append(Died(128 - code))
                else:
                    raise RankFailure(f"rank {rank}: exit code {code}, of all {codes}\n{self._read_output()}")
            return results

    def _read_output(self) -> str:
        lines = []
        for rank in range(self.world_size):
            output = self.folder / f"output{rank}"
            if output.exists() and (text := output.read_text(errors="replace")):
                lines += [f"--- output of rank {rank}", text[-8000:]]
        return "\n".join(lines)
