# SPDX-License-Identifier: Apache-2.0
"""What the outcomes of all runs come to: no test fails or errs, and what stock gloo passes, detcomm passes.

detcomm passes a test at a world size if it does so under one of its names: some tests are open to stock names alone.
``exceptions.json`` holds, by subject and test, each exception and its reason; one that nothing needs is a finding too.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from tests.torch_suite.outcomes import Outcome
from tests.torch_suite.subjects import MEASURE, Run

Results = Mapping[Run, Mapping[str, Outcome]]
Exceptions = Mapping[str, Mapping[str, str]]


def read_exceptions() -> Exceptions:
    exceptions: Exceptions = json.loads(Path(__file__).with_name("exceptions.json").read_text())
    return exceptions


def judge(results: Results, exceptions: Exceptions) -> list[str]:
    """Findings, a line each; none if all is well."""
    needed: set[tuple[str, str]] = set()
    findings = [*_incomplete(results), *_bad(results, exceptions, needed), *_lost(results, exceptions, needed)]
    for subject, tests in exceptions.items():
        findings += [
            f"{subject}: {test}: the exception is not needed" for test in tests if (subject, test) not in needed
        ]
    return findings


def passed_by_detcomm(results: Results, world_size: int) -> set[str]:
    """Under any of its names."""
    return {
        test
        for run, outcomes in results.items()
        if run.world_size == world_size and run.subject != MEASURE
        for test, outcome in outcomes.items()
        if outcome.kind == "passed"
    }


def _incomplete(results: Results) -> list[str]:
    findings = []
    for only_large in (False, True):
        runs = [run for run in results if run.only_large == only_large]
        every = {test for run in runs for test in results[run]}
        for run in runs:
            if missing := sorted(every - set(results[run])):
                findings.append(f"{title(run)}: {len(missing)} tests without an outcome, first {missing[0]}")
    return findings


def _bad(results: Results, exceptions: Exceptions, needed: set[tuple[str, str]]) -> list[str]:
    findings = []
    for run, outcomes in results.items():
        if run.subject == MEASURE:
            continue
        for test, outcome in outcomes.items():
            if not outcome.is_bad:
                continue
            if test in exceptions.get(run.subject.name, {}):
                needed.add((run.subject.name, test))
            else:
                findings.append(f"{title(run)}: {test}: {outcome.kind}: {last_line(outcome.reason)}")
    return findings


def _lost(results: Results, exceptions: Exceptions, needed: set[tuple[str, str]]) -> list[str]:
    findings = []
    for run, outcomes in results.items():
        if run.subject != MEASURE:
            continue
        passed = passed_by_detcomm(results, run.world_size)
        for test, outcome in outcomes.items():
            if outcome.kind != "passed" or test in passed:
                continue
            excused = [subject for subject, tests in exceptions.items() if test in tests]
            needed.update((subject, test) for subject in excused)
            if not excused:
                findings.append(f"world size {run.world_size}: {test}: passed by {MEASURE.name} alone")
    return findings


def title(run: Run) -> str:
    return f"{run.subject.name}, {run.world_size} ranks"


def last_line(text: str) -> str:
    """Of a traceback: the error."""
    lines = [line for line in text.splitlines() if "Error" in line] or text.splitlines() or [""]
    return lines[-1].strip()[:200]
