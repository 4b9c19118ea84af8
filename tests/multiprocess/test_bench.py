# SPDX-License-Identifier: Apache-2.0
"""``detcomm bench`` as a command: it checks, times and writes what it says. No figure is judged here."""

import json
import subprocess
import sys
from pathlib import Path

from detcomm.bench import Case, Contender, Effort, Job, Place, measure
from detcomm.bench.buffers import Buffers
from detcomm.collectives import Collective, DType
from tests import launch

TIMEOUT_S = 240.0


def _bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "detcomm", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_every_contender_is_checked_and_timed_on_every_case(tmp_path: Path) -> None:
    file, picture = tmp_path / "report.json", tmp_path / "report.png"
    arguments = ("--nproc", "3", "--against", "gloo,native", "-b", "64", "-e", "4K", "-f", "64")
    done = _bench(*arguments, "-d", "float,bfloat16", "-n", "2", "-w", "1", "-J", str(file), "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    seen = {(row["collective"], row["dtype"], row["bytes"], row["contender"]) for row in report["rows"]}
    assert len(seen) == len(report["rows"]) == 3 * 2 * 2 * 3
    for row in report["rows"]:
        for place in (row["out_of_place"], row["in_place"]):
            assert place["median_us"] > 0
            assert place["wrong"] == 0
            assert place["bitdiff"] == 0 or row["contender"] == "gloo"
        assert ("times_slower" in row) == (row["contender"] != "detcomm")
    sums = [row for row in report["rows"] if row["op"] == "sum" and row["bytes"] > 4000]
    assert all(
        row["in_place"]["bitdiff"] > 0 for row in sums if row["contender"] == "gloo"
    )  # so it can be other than 0
    assert report["versions"]["torch"]
    assert picture.stat().st_size > 10_000
    table = [text.split() for text in done.stdout.splitlines() if not text.startswith("#")]
    assert len(table) == len(report["rows"])
    assert [text[-1] for text in table] == [row["out_of_place"]["digest"] for row in report["rows"]]


def test_a_training_step_is_timed_with_and_without_communication(tmp_path: Path) -> None:
    file = tmp_path / "training.json"
    arguments = ("--params", "40K", "--layers", "4", "--bucket-mb", "0.05", "--batch", "4", "-n", "2")
    done = _bench("train", "--nproc", "3", *arguments, "--against", "gloo", "--json", str(file))
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    rows = {row["contender"]: row for row in report["rows"]}
    assert list(rows) == ["none", "detcomm", "gloo"]
    assert report["parameters"] == 40_000
    assert (rows["detcomm"]["wrong"], rows["detcomm"]["bitdiff"]) == (0, 0)
    assert rows["gloo"]["wrong"] == 0
    assert rows["gloo"]["bitdiff"] > 0  # so the check of detcomm's bits can fail
    assert all(rows[name]["buckets_us"] > 0 and "exposed_us" in rows[name] for name in ("detcomm", "gloo"))


class _Wrong(Contender):
    """Does nothing, so its result is not the sum."""

    name = "wrong"

    def refusal(self, case: Case, place: Place) -> str | None:
        return None

    def bind(self, case, place, buffers: Buffers):  # type: ignore[no-untyped-def]
        return lambda: None

    def close(self) -> None:
        pass


def _measure_wrong(rank: int, world_size: int) -> tuple[int, list[Place], str]:
    import torch
    import torch.distributed as dist

    from detcomm.association import TREE

    dist.init_process_group("gloo")
    job = Job(torch.device("cpu"), Effort(iters=1), TREE, "float32")
    (found,) = measure(Case(Collective.ALL_REDUCE, DType.FLOAT32, 4096), [_Wrong()], job)
    dist.destroy_process_group()
    return found.checked[Place.OUT].num_wrong, list(found.times), found.refusals[Place.IN]


def test_a_wrong_result_is_not_timed() -> None:
    for num_wrong, timed, why in launch.run(2, _measure_wrong):
        assert num_wrong > 1024
        assert not timed
        assert "elements are wrong" in why
