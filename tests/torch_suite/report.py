# SPDX-License-Identifier: Apache-2.0
"""The table of torch's suite, gloo beside detcomm, for the terminal and for ``docs/conformance.md``."""

import os
import platform
from collections import Counter
from pathlib import Path

import torch

import detcomm
from tests.torch_suite.judgement import Exceptions, Results, passed_by_detcomm
from tests.torch_suite.outcomes import KINDS
from tests.torch_suite.subjects import MEASURE

_INTRODUCTION = """\
# Torch's own suite of distributed tests

`make conformance` made this page: it runs `torch.testing._internal.distributed.distributed_test`, which ships in
torch's wheel and which nobody here wrote, on stock gloo and on detcomm.

Many of the tests ask for a stock backend by name. They run on detcomm under an alias: the suite and torch's Python
side believe in `gloo` or `mpi`, and the groups are detcomm's. Under an alias no profiler events are looked for: they
bear the name that torch's C++ gives them. Tests that ask for `nccl` want GPUs: [gpu.md](gpu.md) has those.

The bar: no test fails or errs, and each test that gloo passes is passed by detcomm under one of its names. Exceptions
stand in `tests/torch_suite/exceptions.json`, each with its reason; `make conformance` fails at anything else.

CI takes gloo and detcomm as gloo and as mpi on three ranks, side by side. The seconds below are each run's own, with as
many runs at a time as there are cores, four at most."""


def table(results: Results, exceptions: Exceptions) -> str:
    """Passed, skipped, failed: a row for each run."""
    rows = [["ranks", "backend", *KINDS, "excepted", "seconds"]]
    for run, outcomes in results.items():
        excepted = exceptions.get(run.subject.name, {})
        counts = Counter(
            "excepted" if outcome.is_bad and outcome.test in excepted else outcome.kind for outcome in outcomes.values()
        )
        numbers = [str(counts[kind]) for kind in (*KINDS, "excepted")]
        rows.append(
            [
                str(run.world_size),
                run.subject.name,
                *numbers,
                f"{sum(outcome.seconds for outcome in outcomes.values()):.0f}",
            ]
        )
    return _aligned(rows)


def page(results: Results, exceptions: Exceptions, findings: list[str]) -> str:
    """The whole of ``docs/conformance.md``."""
    parts = [_INTRODUCTION, _machine(), "## Outcomes", table(results, exceptions), _comparison(results)]
    parts += ["## Exceptions", _exceptions(exceptions), "## Why tests are skipped", _skips(results)]
    if findings:
        parts += ["## Findings", "\n".join(f"- {finding}" for finding in findings)]
    parts.append(Path(__file__).with_name("other_releases.md").read_text().rstrip())
    return "\n\n".join(parts) + "\n"


def _machine() -> str:
    return (
        f"detcomm {detcomm.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} on {_processor()}, {os.cpu_count()} logical cores, no GPU."
    )


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _comparison(results: Results) -> str:
    lines = []
    for run, outcomes in results.items():
        if run.subject != MEASURE:
            continue
        stock = {test for test, outcome in outcomes.items() if outcome.kind == "passed"}
        ours = passed_by_detcomm(results, run.world_size)
        lines.append(
            f"- {run.world_size} ranks: gloo passes {len(stock)}; of these detcomm passes {len(stock & ours)}, "
            f"and {len(ours - stock)} others."
        )
    return "\n".join(lines)


def _exceptions(exceptions: Exceptions) -> str:
    lines = [
        f"- {subject}: `{test}`: {reason}" for subject, tests in exceptions.items() for test, reason in tests.items()
    ]
    return "\n".join(lines) or "None."


def _skips(results: Results) -> str:
    world_size = max((run.world_size for run in results if not run.only_large), default=0)
    runs = [run for run in results if run.subject != MEASURE and run.world_size == world_size]
    rows = [["ranks", "backend", "tests", "reason"]]
    for run in runs:
        reasons = Counter(outcome.reason for outcome in results[run].values() if outcome.kind == "skipped")
        for reason, num_tests in reasons.most_common():
            rows.append([str(run.world_size), run.subject.name, str(num_tests), reason])
    return _aligned(rows)


def _aligned(rows: list[list[str]]) -> str:
    """A table in Markdown; its last column is not padded, since reasons are long."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1] = len(rows[0][-1])
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])
