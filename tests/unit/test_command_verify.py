# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of ``detcomm verify`` and ``probe`` are one line that says what was expected, before ranks start."""

import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from detcomm.commands import app
from detcomm.errors import UsageError

REFUSED = [
    ("verify", "this command needs ranks"),
    ("verify --nproc 2 --association ,", "--association: expected at least one value"),
    ("verify --nproc 2 --association tree,star", "--association: expected among tree, linear, ring, got 'star'"),
    ("verify --nproc 2 --dtypes float33", "--dtypes: expected among .*, got 'float33'"),
    ("verify --nproc 2 --ops add", "--ops: expected among .*, got 'add'"),
    ("verify --nproc 2 --ops avg --dtypes bool", "none of these operations is defined on any of these types"),
    ("verify --nproc 2 --backend pigeon", "torch knows no 'pigeon'; it knows detcomm, .*, and mpi$"),
    ("verify --nproc 2 --device tpu", "--device: expected cpu or cuda, got 'tpu'"),
    ("verify --nproc 2 --import no_such_module", "--import no_such_module: "),
    ("probe", "this command needs ranks"),
    ("probe --nproc 65", "a probe needs 2 to 64 ranks, got 65"),
    ("probe --nproc 2 --sizes 0", "a probe needs at least one element, got 0"),
    ("probe --nproc 2 --sizes many", "--sizes: expected whole numbers, got 'many'"),
    ("probe --nproc 2 --dtypes int32", "a type to probe: expected one of .*, got int32"),
    ("probe --nproc 3 --collective reduce_scatter --sizes 64", "64 elements do not divide evenly over 3 ranks"),
    ("probe --nproc 2 --root 2", "--root: expected a rank below 2, got 2"),
    ("probe --nproc 2 --expect star", "--expect: expected one of tree, linear, ring, got 'star'"),
    ("probe --nproc 2 --draw trees.xyz", "a file name that ends in one of"),
]


@pytest.mark.parametrize(("arguments", "says"), REFUSED)
def test_wrong_arguments_are_refused(arguments: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    outcome = CliRunner().invoke(app, arguments.split())
    assert isinstance(outcome.exception, UsageError), outcome.output
    assert re.search(says, str(outcome.exception)), outcome.exception


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a user who is not root, and may not."""

    def refusal(path: Path) -> str:
        outcome = CliRunner().invoke(app, ["verify", "--nproc", "2", "--json", str(path)])
        assert outcome.exit_code == 2
        return " ".join(outcome.output.replace("│", " ").split())

    assert "a file in a folder that exists" in refusal(tmp_path)
    assert "a file in a folder that exists" in refusal(tmp_path / "no" / "a.json")
    asked: list[str] = []

    def may_not(path: Path, mode: int) -> bool:
        asked.append(os.fspath(path))
        return False

    monkeypatch.setattr(os, "access", may_not)  # a test that root runs would be allowed everything
    assert "permission denied" in refusal(tmp_path / "a.json")
    assert asked == [str(tmp_path)]
