# SPDX-License-Identifier: Apache-2.0
"""The judgement of torch's suite sees a failure, an error, a loss against gloo, a crashed run and a stale exception."""

from pathlib import Path

from tests.torch_suite import outcomes, report
from tests.torch_suite.judgement import Exceptions, Results, judge, read_exceptions
from tests.torch_suite.outcomes import KINDS, Kind, Outcome
from tests.torch_suite.subjects import SUBJECTS, Run, named, whole

GLOO, DETCOMM, ALIAS = (Run(named(name), 3) for name in ("gloo", "detcomm", "detcomm as gloo"))


def _results(gloo: list[Kind], detcomm: list[Kind], alias: list[Kind]) -> Results:
    return {
        run: {f"test_{index}": Outcome(f"test_{index}", kind, "why", 1.0) for index, kind in enumerate(kinds)}
        for run, kinds in ((GLOO, gloo), (DETCOMM, detcomm), (ALIAS, alias))
    }


def _judge(results: Results, exceptions: Exceptions | None = None) -> list[str]:
    return judge(results, exceptions or {})


def test_all_is_well() -> None:
    assert not _judge(_results(["passed", "skipped"], ["passed", "passed"], ["skipped", "skipped"]))


def test_one_name_is_enough() -> None:
    assert not _judge(_results(["passed"], ["skipped"], ["passed"]))
    assert _judge(_results(["passed"], ["skipped"], ["skipped"])) == ["world size 3: test_0: passed by gloo alone"]


def test_another_world_size_does_not_count() -> None:
    results = dict(_results(["passed"], ["skipped"], ["skipped"]))
    results[Run(named("detcomm"), 4)] = {"test_0": Outcome("test_0", "passed", "", 1.0)}
    assert _judge(results) == ["world size 3: test_0: passed by gloo alone"]


def test_a_failure_counts_even_if_another_name_passes() -> None:
    for kind in ("failed", "error"):
        findings = _judge(_results(["passed"], [kind], ["passed"]))
        assert findings == [f"detcomm, 3 ranks: test_0: {kind}: why"]


def test_failures_of_gloo_are_not_ours() -> None:
    assert not _judge(_results(["failed", "error"], ["passed", "skipped"], ["passed", "skipped"]))


def test_a_run_that_crashed_is_incomplete() -> None:
    findings = _judge(_results(["passed", "passed"], ["passed"], ["passed", "passed"]))
    assert findings == ["detcomm, 3 ranks: 1 tests without an outcome, first test_1"]


def test_exceptions_excuse_what_they_name_and_must_be_needed() -> None:
    exceptions = {"detcomm": {"test_0": "a reason"}}
    assert not _judge(_results(["passed"], ["failed"], ["skipped"]), exceptions)
    assert _judge(_results(["passed"], ["failed"], ["failed"]), exceptions) == [
        "detcomm as gloo, 3 ranks: test_0: failed: why"
    ]
    assert _judge(_results(["passed"], ["passed"], ["passed"]), exceptions) == [
        "detcomm: test_0: the exception is not needed"
    ]


def test_exceptions_name_a_subject_and_a_reason() -> None:
    for subject, tests in read_exceptions().items():
        assert subject in {known.name for known in SUBJECTS}
        assert all(len(reason) > 20 for reason in tests.values())


def test_outcomes_come_back_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    assert outcomes.read(path) == {}
    written = [Outcome(f"test_{kind}", kind, "a\nb", 0.5) for kind in KINDS]
    for outcome in written:
        outcomes.append(path, outcome)
    assert list(outcomes.read(path).values()) == written


def test_the_page_has_a_row_for_each_run() -> None:
    results = _results(["passed", "passed", "skipped"], ["passed", "skipped", "error"], ["skipped", "passed", "passed"])
    page = report.page(results, {"detcomm": {"test_2": "a reason"}}, ["a finding"])
    assert "gloo passes 2; of these detcomm passes 2, and 1 others" in page
    assert "- detcomm: `test_2`: a reason" in page
    assert "- a finding" in page
    lines = [line.replace(" ", "") for line in page.splitlines()]
    assert "|3|detcomm|1|1|0|0|1|3|" in lines
    assert "|3|detcomm|1|why|" in lines


def test_the_whole_has_every_name_in_every_world() -> None:
    runs = whole()
    assert len(set(runs)) == len(runs)
    assert {run.world_size for run in runs} == {2, 3, 4, 8}
    assert all(run.only_large == (run.world_size == 8) for run in runs)
