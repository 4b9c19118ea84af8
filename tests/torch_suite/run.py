# SPDX-License-Identifier: Apache-2.0
"""Torch's suite on gloo and detcomm, in every world size, and what it comes to: ``make conformance``.

Each run is a fresh process, since ranks are forked from it and the suite reads its backend and world size on import.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.torch_suite import judgement, outcomes, report, subjects
from tests.torch_suite.outcomes import Outcome
from tests.torch_suite.subjects import Run

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 2700.0
TEST_DEADLINE_S = 240


def execute(run: Run, folder: Path, tests: Sequence[str] = (), deadline_s: float = DEADLINE_S) -> dict[str, Outcome]:
    """One run; its outcomes and its log come into ``folder``. A run past its deadline is killed, and is incomplete."""
    path = _path(run, folder)
    path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as temporary, path.with_suffix(".log").open("w") as log:
        environment = {
            **os.environ,
            "BACKEND": run.subject.suite_name,
            "WORLD_SIZE": str(run.world_size),
            "TEMP_DIR": temporary,
            "OMP_NUM_THREADS": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # whoever starts CUDA can fork no ranks that use it
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_DEADLINE_S),
        }
        command = [sys.executable, "-m", "tests.torch_suite.suite", run.subject.name, str(path), *tests]
        if run.only_large:
            command.append("--only-large")
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
    return outcomes.read(path)


def _path(run: Run, folder: Path) -> Path:
    return folder / f"{run.subject.name.replace(' ', '-')}-{run.world_size}.jsonl"


def _read(run: Run, folder: Path) -> dict[str, Outcome]:
    return outcomes.read(_path(run, folder))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what the run has left: its ranks are in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "conformance", help="of outcomes and logs")
    parser.add_argument("--page", type=Path, help="write the report there, as Markdown")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 4), help="runs at once")
    parser.add_argument("--judge", action="store_true", help="run nothing: judge the outcomes in the folder")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    runs = subjects.whole()
    results = {}
    with ThreadPoolExecutor(given.jobs) as pool:
        take = partial(_read if given.judge else execute, folder=given.folder)
        for run, found in zip(runs, pool.map(take, runs), strict=True):
            results[run] = found
            bad = [outcome.test for outcome in found.values() if outcome.is_bad]
            print(f"{judgement.title(run)}: {len(found)} tests; failed: {', '.join(bad) or 'none'}", flush=True)
    exceptions = judgement.read_exceptions()
    findings = judgement.judge(results, exceptions)
    print(report.table(results, exceptions))
    print(
        "\n".join(findings) or "Nothing fails, and detcomm passes all that gloo passes, but for the exceptions listed."
    )
    if given.page:
        given.page.write_text(report.page(results, exceptions, findings))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
