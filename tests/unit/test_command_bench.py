# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of ``detcomm bench`` are one line that says what was expected, before any rank is started."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from detcomm.commands import app
from detcomm.commands.bench import check_backends
from detcomm.errors import UsageError

REFUSED = [
    ("--nproc 1", "at least two ranks, got 1"),
    ("--nproc 2 --sizes 4Q", "expected bytes such as 4K, 1M or 65536, got '4Q'"),
    ("--nproc 2 --collectives scan", "--collectives: .*got 'scan'"),
    ("--nproc 2 --against pigeon", "--against: .*gloo.* got 'pigeon'"),
    ("--nproc 2 --against gloo,gloo", "each name once"),
    ("--nproc 2 --against nccl-ring", "needs --device cuda"),
    ("--nproc 2 --device tpu", "expected cpu or cuda, got 'tpu'"),
    ("--nproc 2 -b 0", "expected 1 to --maxbytes, got 0 to 64M"),
    ("--nproc 2 -b 2M -e 1M", "expected 1 to --maxbytes, got 2M to 1M"),
    ("--nproc 2 -f 2 -i 4", "-f and -i: expected one of them"),
    ("--nproc 2 -i 0", "--stepbytes: expected at least 1"),
    ("--nproc 2 -o scan", "--op: .*got 'scan'"),
    ("--nproc 2 -o avg -d bool", "none of avg is defined on bool"),
    ("--nproc 2 -d complex64", "--datatype: .*got 'complex64'"),
    ("--nproc 2 --place there", "--place: expected both, out, in or usual"),
    ("--nproc 2 --plot picture.xyz", "a file name that ends in one of"),
    ("--threshold 0.1", "--threshold needs --compare"),
    ("--compare missing.json missing.json", "No such file"),
    ("train --nproc 2 --params much", "--params: expected a number such as 25M, got 'much'"),
    ("train --nproc 2 --against native", "takes a backend of torch"),
    ("train --nproc 2 -d int32", "--datatype: .*got 'int32'"),
]


@pytest.mark.parametrize(("arguments", "says"), REFUSED)
def test_wrong_arguments_are_refused(arguments: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    outcome = CliRunner().invoke(app, ["bench", *arguments.split()])
    assert isinstance(outcome.exception, UsageError), outcome.output
    assert outcome.exception.args[0]
    with pytest.raises(UsageError, match=says):
        raise outcome.exception


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    for option in ("--json", "--plot"):
        outcome = CliRunner().invoke(app, ["bench", "--nproc", "2", option, str(tmp_path / "no" / "a.png")])
        assert outcome.exit_code == 2
        assert "cannot be written" in " ".join(outcome.output.replace("│", " ").split())  # in a frame, in lines


def test_detcomm_comes_first_and_once() -> None:
    assert check_backends(4, None, "cpu") == ["detcomm", "gloo"]
    assert check_backends(4, "mpi,detcomm,gloo", "cpu") == ["detcomm", "mpi", "gloo"]


def _training(folder: Path, name: str, step_us: float, digest: str = "c0ffee") -> str:
    rows = [{"contender": "none", "step_us": 100.0}, {"contender": "detcomm", "step_us": step_us, "digest": digest}]
    about = {"kind": "training", "world_size": 3, "device": "cpu", "subject": "detcomm"}
    (folder / name).write_text(json.dumps(about | {"rows": rows}))
    return str(folder / name)


def test_a_comparison_judges_by_its_threshold(tmp_path: Path) -> None:
    old = _training(tmp_path, "old.json", 200.0)
    slower = _training(tmp_path, "slower.json", 230.0)
    other_bits = _training(tmp_path, "other.json", 200.0, digest="decade")
    for new, threshold, exit_code, says in (
        (old, ["--threshold", "0.1"], 0, "passes"),
        (slower, [], 0, "1.150"),
        (slower, ["--threshold", "0.2"], 0, "passes"),
        (slower, ["--threshold", "0.1"], 1, "fails"),
        (other_bits, ["--threshold", "0.1"], 1, "others"),
    ):
        outcome = CliRunner().invoke(app, ["bench", "--compare", old, new, *threshold])
        assert outcome.exit_code == exit_code, outcome.output
        assert says in outcome.output
