# SPDX-License-Identifier: Apache-2.0
"""The example of golden runs: under torchrun by the command that people use, then on forked ranks."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from detcomm.commands import app
from detcomm.golden.file import FILE_VARIABLE, read
from tests.launch import Ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "golden" / "train.py"
STEPS = ("--steps", "3")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded by ``detcomm golden record -- torchrun …``."""
    path = tmp_path_factory.mktemp("golden") / "ref.golden"
    record = [sys.executable, "-m", "detcomm", "golden", "record", "--out", str(path), "--"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*record, *torchrun, str(EXAMPLE), *STEPS], capture_output=True, text=True, timeout=500, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"3 steps of 3 ranks (detcomm tree/1:float32) in {path}" in done.stderr
    return path


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as standing:
        yield standing


def _train(rank: int, world_size: int, arguments: tuple[str, ...]) -> None:
    sys.argv = [str(EXAMPLE), *STEPS, *arguments]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def _check(ranks: Ranks, reference: Path, run: Path, *arguments: str) -> Result:
    ranks.run(_train, arguments, env={FILE_VARIABLE: str(run)})
    return CliRunner().invoke(app, ["golden", "check", str(reference), str(run)])


def test_another_bucket_size_is_equal(ranks: Ranks, reference: Path, tmp_path: Path) -> None:
    result = _check(ranks, reference, tmp_path / "run.golden", "--bucket-mb", "0.001")
    assert result.exit_code == 0, result.output
    assert "equal: 3 steps" in result.output
    assert read(reference).steps == read(tmp_path / "run.golden").steps


def test_another_learning_rate_differs_and_is_named(ranks: Ranks, reference: Path, tmp_path: Path) -> None:
    """The first step's loss, gradients and optimizer state are the same; its weights are not."""
    result = _check(ranks, reference, tmp_path / "run.golden", "--learning-rate", "0.02")
    assert result.exit_code == 1, result.output
    output = " ".join(result.output.split())
    expected = read(reference).steps[0].tensors["weights", "0.weight"].digest
    assert re.search(f"DIFFERS first at step 0: weights of 0.weight: expected {expected}, got [0-9a-f]{{32}}", output)
