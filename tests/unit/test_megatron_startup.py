# SPDX-License-Identifier: Apache-2.0
"""What ``initialize`` refuses before anything is set, and the launcher: its options, the script's, and exit codes."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from detcomm.errors import UsageError
from detcomm.megatron import __main__ as launcher
from detcomm.megatron import initialize, job
from detcomm.megatron.startup import DEFAULT_TIMEOUT, LAUNCH_VARIABLES

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
PATIENCE_S = 240


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        ({"policy": "dpp=stock"}, {}, "no group of Megatron fits 'dpp'"),
        ({}, {"DETCOMM_MEGATRON_POLICY": "dp=nccl"}, "expected fixed, stock"),
        ({"allow": ["everything"]}, {}, "got everything"),
        ({}, {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}, "NVTE_ALLOW_NONDETERMINISTIC_ALGO: expected 0"),
        ({}, {"DETCOMM_ASSOCIATION": "star"}, "association"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_a_refusal_leaves_nothing_behind(
    arguments: dict[str, Any], environ: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    before = list(sys.meta_path)
    with pytest.raises(UsageError, match=message):
        initialize(**arguments)
    assert not job.is_running()
    assert not torch.distributed.is_initialized()
    assert not torch.are_deterministic_algorithms_enabled()
    assert sys.meta_path == before
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.usefixtures("alone")
def test_without_a_launcher_there_are_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name)
    with pytest.raises(UsageError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set; start the script"):
        initialize()


def test_options_before_the_script_are_ours_and_the_rest_is_the_scripts() -> None:
    settings = launcher._parser().parse_args(
        ["--policy", "pp=stock", "--exact-grad-norm", "pretrain_gpt.py", "--policy", "x", "-m", "--", "--seed", "1"]
    )
    assert settings.policy == "pp=stock"
    assert settings.exact_grad_norm
    assert not settings.module
    assert settings.script == "pretrain_gpt.py"
    assert settings.arguments == ["--policy", "x", "-m", "--", "--seed", "1"]


@pytest.mark.parametrize(
    ("arguments", "timeout"),
    [
        ([], DEFAULT_TIMEOUT),
        (["--seed", "1", "--distributed-timeout-minutes", "3"], timedelta(minutes=3)),
        (["--distributed-timeout-minutes=45", "--lr", "-1"], timedelta(minutes=45)),
    ],
)
def test_megatrons_timeout_holds_for_the_group_that_it_no_longer_makes(
    arguments: list[str], timeout: timedelta
) -> None:
    assert launcher._timeout(arguments) == timeout


SCRIPT = """
import json, sys
import torch.distributed as dist
from neighbour import NAME

print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "neighbour": NAME, "backend": dist.get_backend(),
    "main": sys.modules["__main__"].__file__,
}))
sys.exit(7)
"""


def _launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "detcomm.megatron", *arguments]
    return subprocess.run(
        command, cwd=folder, env=os.environ | ALONE, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_the_script_runs_as_if_python_had_started_it(tmp_path: Path) -> None:
    folder = tmp_path / "training"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    (folder / "neighbour.py").write_text("NAME = 'beside the script'\n")
    ended = _launch(tmp_path, "--association", "ring", "training/script.py", "--association", "Megatron's")
    assert ended.returncode == 7, ended.stderr
    assert json.loads(ended.stdout) == {
        "argv": ["training/script.py", "--association", "Megatron's"],
        "path": str(folder),
        "name": "__main__",
        "neighbour": "beside the script",
        "backend": "detcomm",
        "main": "training/script.py",
    }


def test_an_error_of_ours_is_one_line_and_the_script_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('started')\n")
    ended = _launch(tmp_path, "--policy", "dp=nccl", "script.py")
    assert ended.returncode == 2
    assert ended.stderr.startswith("detcomm: policy: expected fixed, stock")
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stdout == ""


def test_a_script_that_does_not_exist_is_refused_before_a_group_is_made() -> None:
    settings = launcher._parser().parse_args(["nothing.py"])
    with pytest.raises(UsageError, match=r"expected a file, got nothing\.py"):
        launcher._start(settings)
