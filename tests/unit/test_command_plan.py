# SPDX-License-Identifier: Apache-2.0
"""`detcomm plan` as a person uses it: the drawing, the tables, the proof, and what it says to nonsense."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from detcomm.association import TREE
from detcomm.commands import app, main

RUNNER = CliRunner(env={"COLUMNS": "200"})


def test_prints_the_tree_the_bytes_and_the_proof() -> None:
    result = RUNNER.invoke(app, ["plan", "--world", "5", "--count", "1000", "--schedule", "direct", "--verify"])
    assert result.exit_code == 0, result.output
    assert "(((0+1)+(2+3))+4)" in result.output
    assert "tree/1:float32" in result.output
    assert TREE.digest(5).hex() in result.output
    assert "32,000" in result.output  # 2 (N-1) S over all ranks
    assert "proved: 5 cells, 40 transfers" in result.output


def test_writes_the_same_as_json(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    arguments = [
        "--world",
        "1024",
        "--node-size",
        "8",
        "--schedule",
        "staged(8,16,8)",
        "--model",
        "h200-ib",
        "--verify",
    ]
    result = RUNNER.invoke(app, ["plan", *arguments, "--json", str(file)])
    assert result.exit_code == 0, result.output
    told = json.loads(file.read_text())
    assert told["digest"] == TREE.digest(1024).hex()
    assert told["proof"]["stages"] == [8, 16, 8]
    assert told["proof"]["complete"]
    assert told["traffic"]["steps"] == 6
    assert {row["world_size"] for row in told["prices"]} >= {8, 1024, 16384}
    assert f"{told['traffic']['bytes']:,}" in result.output


def test_prints_one_ranks_plan() -> None:
    result = RUNNER.invoke(app, ["plan", "--world", "3", "--count", "9", "--association", "ring", "--rank", "1"])
    assert result.exit_code == 0, result.output
    assert "fold   linear x9 (leaf input[0:36], leaf scratch[64:100], leaf scratch[0:36])" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--schedule", "ring"], "does not implement association tree"),
        (["--schedule", "butterfly"], "unknown schedule 'butterfly'"),
        (["--schedule", "staged(3,2)"], "power of two"),
        (["--schedule", "staged(2)"], "reaches 2 ranks"),
        (["--association", "star"], "unknown association 'star'"),
        (["--collective", "reduce", "--root", "9"], "expected a rank below 4"),
        (["--op", "band"], "band is not defined on float32"),
        (["--collective", "reduce_scatter", "--count", "9"], "do not divide evenly"),
        (["--accumulate", "float64"], "expected float32 or wire"),
    ],
)
def test_what_is_not_legal_ends_with_one_clear_line(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["detcomm", "plan", "--world", "4", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1
