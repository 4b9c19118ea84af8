# SPDX-License-Identifier: Apache-2.0
"""Torch's own suite of distributed tests on three ranks: what stock gloo passes, detcomm passes.

``make conformance`` does the same for every name and world size.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.torch_suite import judgement, report
from tests.torch_suite.run import execute
from tests.torch_suite.subjects import Run, named

DEADLINE_S = 900.0
"""Of one run, which takes one minute on an idle machine."""

RUNS = [Run(named(name), 3) for name in ("gloo", "detcomm as gloo", "detcomm as mpi")]


@pytest.mark.timeout(DEADLINE_S + 60)
def test_detcomm_passes_what_gloo_passes(tmp_path: Path) -> None:
    with ThreadPoolExecutor(len(RUNS)) as pool:  # they sleep more than they compute
        found = pool.map(partial(execute, folder=tmp_path, deadline_s=DEADLINE_S), RUNS)
        results = dict(zip(RUNS, found, strict=True))
    exceptions = judgement.read_exceptions()
    print(report.table(results, exceptions))
    passed = {test for test, outcome in results[RUNS[0]].items() if outcome.kind == "passed"}
    assert passed, "gloo passes nothing: the runner is broken"
    findings = judgement.judge(results, exceptions)
    bad = [outcome.reason for run in RUNS[1:] for outcome in results[run].values() if outcome.is_bad]
    assert not findings, "\n".join([*findings, *bad])
