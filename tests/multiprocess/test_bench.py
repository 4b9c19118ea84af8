# SPDX-License-Identifier: Apache-2.0
"""``detcomm bench`` as a command: it checks, times and writes what it says. No figure is judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from detcomm.bench import Case, Contender, Effort, measure
from detcomm.bench.run import WrongResultError
from detcomm.collectives import Collective, DType
from tests import launch

TIMEOUT_S = 170.0


def _bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "detcomm", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_every_contender_is_timed_on_every_case(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    arguments = ("--nproc", "2", "--against", "gloo,native", "--sizes", "64,4K", "--dtypes", "float32,bfloat16")
    done = _bench(*arguments, "--rounds", "3", "--turn-s", "0", "--json", str(file))
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    seen = {(row["collective"], row["dtype"], row["bytes"], row["contender"]) for row in report["rows"]}
    assert len(seen) == len(report["rows"]) == 3 * 2 * 2 * 3
    assert all(row["median_us"] > 0 for row in report["rows"])
    assert all(("times_slower" in row) == (row["contender"] != "detcomm") for row in report["rows"])
    assert "reduce_scatter" in done.stdout
    assert report["versions"]["torch"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--nproc", "1"), "at least two ranks"),
        (("--nproc", "2", "--sizes", "4Q"), "expected bytes such as 4K"),
        (("--nproc", "2", "--collectives", "scan"), "got 'scan'"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: tuple[str, ...], text: str) -> None:
    done = _bench(*arguments)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


class _Wrong(Contender):
    """Does nothing, so its result is not the sum."""

    name = "wrong"

    def refusal(self, case: Case) -> str | None:
        return None

    def bind(self, case, input, output):  # type: ignore[no-untyped-def]
        return lambda: None

    def close(self) -> None:
        pass


def _measure_wrong(rank: int, world_size: int) -> str:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    with pytest.raises(WrongResultError) as raised:
        measure([Case(Collective.ALL_REDUCE, DType.FLOAT32, 4096)], [_Wrong()], Effort(rounds=3, turn_s=0.0))
    dist.destroy_process_group()
    return str(raised.value)


def test_a_wrong_result_is_not_timed() -> None:
    assert all("received a wrong byte" in text for text in launch.run(2, _measure_wrong))
