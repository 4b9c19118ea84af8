# SPDX-License-Identifier: Apache-2.0
"""A training with Megatron that is stopped and resumed by fresh processes, and one that is recorded and checked."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import launch
from tests.multiprocess import megatron_cases as cases

cases.need_megatron()

LAYOUT = cases.Layout("DP4", 4, ("--distributed-optimizer", "--exact-norm"))
HALF_SIZE = cases.Layout("DP2", 2, LAYOUT.arguments)
LINEAR = {"DETCOMM_ASSOCIATION": "linear"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run that stopped after two steps."""
    folder = tmp_path_factory.mktemp("megatron") / "checkpoint"
    cases.train(LAYOUT, "fp32", cases.FIRST, "--save", str(folder), may_start_processes=True)
    return folder


@pytest.fixture(scope="module")
def straight() -> list[dict[str, Any]]:
    """The steps of a run that was never stopped."""
    return cases.train(LAYOUT, "fp32", cases.FIRST, "--steps", "4")


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(checkpoint: Path, straight: list[dict[str, Any]]) -> None:
    resumed = cases.train(LAYOUT, "fp32", cases.FIRST, "--steps", "4", "--load", str(checkpoint))
    moved = cases.train(LAYOUT, "fp32", cases.MOVED, "--steps", "4", "--load", str(checkpoint))
    assert [step["step"] for step in resumed] == [2, 3]
    assert cases.bits(straight)[2:] == cases.bits(resumed) == cases.bits(moved)


def test_a_resume_under_another_order_of_additions_is_refused_unless_forced(
    checkpoint: Path, straight: list[dict[str, Any]]
) -> None:
    going_on = ("--steps", "3", "--load", str(checkpoint))
    with pytest.raises(launch.RankFailure, match=r"tree/1:float32.*linear/1:float32"):
        cases.train(LAYOUT, "fp32", cases.FIRST, *going_on, env=LINEAR)
    forced = cases.train(LAYOUT, "fp32", cases.FIRST, *going_on, "--force-load", env=LINEAR)
    assert cases.bits(forced) != cases.bits(straight[2:3]), "the other order must show"


def test_a_resume_with_groups_of_other_sizes_is_refused(checkpoint: Path) -> None:
    with pytest.raises(launch.RankFailure, match=r"of 4 ranks.*of 2 ranks"):
        cases.train(HALF_SIZE, "fp32", cases.FIRST, "--load", str(checkpoint))


def test_a_golden_run_is_recorded_and_checked(tmp_path: Path) -> None:
    """Another bucket size passes; another learning rate is found, at the first weights that it has changed."""
    files = {name: tmp_path / f"{name}.golden" for name in ("reference", "buckets", "changed")}
    one = ("--steps", "1", "--golden")
    cases.train(LAYOUT, "fp32", cases.FIRST, *one, str(files["reference"]))
    cases.train(LAYOUT, "fp32", cases.BUCKETS_3000, *one, str(files["buckets"]))
    cases.train(LAYOUT, "fp32", cases.FIRST, *one, str(files["changed"]), "--lr", "1.001e-3")
    equal = _check(files["reference"], files["buckets"])
    assert equal.returncode == 0, equal.stdout + equal.stderr
    changed = _check(files["reference"], files["changed"])
    assert changed.returncode == 1, changed.stdout + changed.stderr
    assert "step 0" in changed.stdout
    assert "weights" in changed.stdout


def _check(reference: Path, run: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "detcomm", "golden", "check", str(reference), str(run)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
