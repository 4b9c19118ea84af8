# SPDX-License-Identifier: Apache-2.0
"""Runs torch's own suite of distributed tests once, in this process: one subject, one world size.

    BACKEND=gloo WORLD_SIZE=3 TEMP_DIR=... python -m tests.torch_suite.suite "detcomm as gloo" outcomes.jsonl [TEST...]

The suite is ``torch.testing._internal.distributed.distributed_test``, as the wheel of torch brings it. The tests are
torch's; changed are what they call a backend, how ranks are started (forked from this process, which never computes
with torch, instead of spawned: a tenth of a second instead of many), and how long they wait for each other, so that a
loaded machine fails none. Ranks that end by a signal fail their test; torch looks at the first rank alone.
"""

import argparse
import os
import sys
import time
import traceback
import unittest
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import multiprocessing

import detcomm  # noqa: F401 - registers the backend
from tests.torch_suite import alias, gates, outcomes, shared_gpus, subjects

PATIENCE_S = 240
"""How long ranks wait for each other; each test has as long in all."""


def load(subject: subjects.Subject, world_size: int) -> type[unittest.TestCase]:
    """The suite's tests, for this subject. Imports the suite, which reads the environment."""
    gates.open_to(subjects.DETCOMM)
    gates.check_before_ranks_start(world_size)
    shares_gpus = subject.suite_name == "nccl" and shared_gpus.share(world_size)
    if subject.suite_name == "nccl":
        shared_gpus.leave_cuda_alone()
    if subject.is_alias:
        dist.is_mpi_available = lambda: True
        alias.install(subject.suite_name, subject.backend)
    from torch.testing._internal.distributed import distributed_test

    if subject.is_alias:
        gates.close_profiling_to(subject.suite_name)
    distributed_test.default_pg_timeout = PATIENCE_S
    barrier: Any = distributed_test.Barrier.sync
    barrier.__func__.__defaults__ = (None, PATIENCE_S)

    class TorchSuite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()  # type: ignore[no-untyped-call]
            self._start_processes(multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, *args: Any, **kwargs: Any) -> None:
            if shares_gpus:
                shared_gpus.be_a_host(rank)
            super()._run(rank, *args, **kwargs)

        def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
            super()._check_return_codes(fn, elapsed_time)
            if fn not in self.skip_return_code_checks:
                codes = [process.exitcode for process in self.processes]
                assert min(codes) >= 0, f"exit codes of the ranks: {codes}"

    return TorchSuite


class Recorder(unittest.TestResult):
    """Writes down each test's outcome as it ends."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._began = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._began = time.monotonic()

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._write(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._write(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._write(test, "failed", "".join(traceback.format_exception(*err)))

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._write(test, "error", "".join(traceback.format_exception(*err)))

    def _write(self, test: unittest.TestCase, kind: outcomes.Kind, reason: str = "") -> None:
        name = test.id().rpartition(".")[2]
        outcome = outcomes.Outcome(name, kind, reason, round(time.monotonic() - self._began, 2))
        outcomes.append(self._path, outcome)
        print(f"{outcome.kind:8}{outcome.seconds:7.1f} s  {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", help="a subject's name")
    parser.add_argument("outcomes", type=Path)
    parser.add_argument("tests", nargs="*", help="all, if none is named")
    parser.add_argument("--only-large", action="store_true", help="the tests that are skipped in small worlds")
    given = parser.parse_args()
    for folder in ("barrier", "test_dir", "init_dir"):
        Path(os.environ["TEMP_DIR"], folder).mkdir(parents=True, exist_ok=True)
    suite = load(subjects.named(given.subject), int(os.environ["WORLD_SIZE"]))
    names = given.tests or unittest.TestLoader().getTestCaseNames(suite)
    if given.only_large:
        names = [name for name in names if hasattr(getattr(suite, name), gates.ASKS_FOR_A_LARGE_WORLD)]
    recorder = Recorder(given.outcomes)
    for name in names:
        if hasattr(suite, name):
            suite(name).run(recorder)
        else:
            outcomes.append(given.outcomes, outcomes.Outcome(name, "skipped", "this torch has no such test", 0.0))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
