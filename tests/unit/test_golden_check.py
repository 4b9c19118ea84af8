# SPDX-License-Identifier: Apache-2.0
"""``detcomm golden check`` and ``record`` as people call them: exit codes, and the first difference by name."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from detcomm.commands import app
from detcomm.errors import UsageError
from detcomm.golden import Recorder
from detcomm.golden.file import read

RUNNER = CliRunner()


def _values(step: int, name: str) -> torch.Tensor:
    return torch.arange(4.0) + step if name == "a" else torch.full((2,), 0.1 * step)


def _write(
    path: Path,
    change: Callable[[int, str], torch.Tensor] = _values,
    steps: range = range(4),
    losses: Callable[[int], float] = float,
    names: str = "ab",
    **arguments: Any,
) -> Path:
    with Recorder(path, **arguments) as run:
        for step in steps:
            for kind in ("gradients", "weights"):
                for name in names:
                    run.add(kind, name, change(step, name) * (2 if kind == "weights" else 1))
            run.step(step, loss=losses(step))
    return path


def _check(*arguments: object) -> tuple[int, str]:
    result = RUNNER.invoke(app, ["golden", "check", *map(str, arguments)])
    if isinstance(result.exception, UsageError):
        return 2, str(result.exception)  # as main() tells it
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    return _write(tmp_path / "ref.golden")


def test_equal(reference: Path, tmp_path: Path) -> None:
    code, text = _check(reference, _write(tmp_path / "run.golden"))
    assert (code, text) == (0, "equal: 4 steps, 20 comparisons")


def test_the_first_difference_is_named_and_all_are_in_the_json(reference: Path, tmp_path: Path) -> None:
    def flipped(step: int, name: str) -> torch.Tensor:
        values = _values(step, name)
        if step >= 2 and name == "b":
            values.view(torch.int32)[1] ^= 1
        return values

    report = tmp_path / "report.json"
    code, text = _check(reference, _write(tmp_path / "run.golden", flipped), "--json", report)
    assert code == 1
    assert "DIFFERS first at step 2: gradients of b: expected " in text
    content = json.loads(report.read_text())
    assert not content["equal"]
    assert [(each["step"], each["kind"], each["name"]) for each in content["differences"]] == [
        (step, kind, "b") for step in (2, 3) for kind in ("gradients", "weights")
    ]


def test_a_zero_s_sign_and_the_loss_count(reference: Path, tmp_path: Path) -> None:
    run = _write(tmp_path / "run.golden", losses=lambda step: -0.0 if step == 0 else float(step))
    code, text = _check(reference, run)
    assert code == 1
    assert "first at step 0: loss: expected 0.0 (0x0000000000000000 float64" in text
    assert "got -0.0 (0x8000000000000000 float64" in text


def test_steps_tensors_and_forms_that_are_missing_differ(reference: Path, tmp_path: Path) -> None:
    later = _write(tmp_path / "later.golden", steps=range(2, 5))
    code, text = _check(reference, later)
    assert code == 1
    assert "first at step 0: step: expected recorded, got absent" in text
    assert _check(reference, later, "--common-steps") == (0, "equal: 2 steps, 10 comparisons")
    code, text = _check(reference, _write(tmp_path / "fewer.golden", names="a"))
    assert code == 1
    assert re.search("first at step 0: gradients of b: expected [0-9a-f]{32}, got absent", text)
    reshaped = _write(tmp_path / "form.golden", lambda step, name: _values(step, name).double())
    assert "gradients of a: expected float32, got float64" in _check(reference, reshaped)[1]


def test_summaries_are_compared_with_tensors(reference: Path, tmp_path: Path) -> None:
    equal = _write(tmp_path / "equal.golden", detail="summary")
    assert _check(reference, equal) == (0, "equal: 4 steps, 12 comparisons")
    other = _write(tmp_path / "other.golden", lambda step, name: _values(step, name) * (step != 3), detail="summary")
    code, text = _check(reference, other)
    assert code == 1
    assert "first at step 3: gradients: expected " in text


def test_an_unfinished_run_is_compared_as_far_as_it_goes(reference: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.golden"
    with pytest.raises(ZeroDivisionError):
        _write(path, losses=lambda step: 1 / (3 - step) and float(step))
    code, text = _check(reference, f"{path}.partial")
    assert code == 1
    assert "first at step 3: step: expected recorded, got absent" in text
    assert "run.golden.partial ends before its run did, after step 2" in text


def test_what_is_not_comparable_is_refused_and_other_settings_are_listed(reference: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.golden"
    changed.write_text(reference.read_text().replace('"world_size": 1', '"world_size": 2'))
    code, text = _check(reference, changed)
    assert (code, text) == (
        2,
        "the runs are not comparable, their bits differ by right: world_size: expected 1, got 2",
    )
    assert _check(reference, changed, "--force")[0] == 0
    changed.write_text(reference.read_text().replace('"numerics": []', '"numerics": ["detcomm ring/1[8]:float32"]'))
    assert "numerics: expected [], got ['detcomm ring/1[8]:float32']" in _check(reference, changed)[1]
    code, text = _check(reference, _write(tmp_path / "config.golden", config={"seed": 7}))
    assert code == 0
    assert "config.seed │ absent │ 7" in text
    code, text = _check(reference, _write(tmp_path / "late.golden", steps=range(9, 12)))
    assert (code, text) == (2, "no step in common: expected steps 0 to 3, got steps 9 to 11")


PROGRAM = """
import sys, torch
from detcomm.golden import Recorder
with Recorder() as run:
    for step in range(3):
        if str(step) in sys.argv:
            sys.exit(7)
        run.step(step, model={"w": torch.ones(2)})
"""


@pytest.mark.parametrize(
    ("program", "arguments", "code", "says"),
    [
        (PROGRAM, ["2"], 7, "the command failed; what it recorded until then is in "),
        (PROGRAM.replace("with Recorder() as run:", "run = Recorder()\nif True:"), [], 2, "was never closed"),
        ("pass", [], 2, "nothing was recorded"),
        (None, [], 2, "no-such-program: No such file or directory"),
    ],
)
def test_record_says_what_went_wrong(
    tmp_path: Path, program: str | None, arguments: list[str], code: int, says: str
) -> None:
    """That it records is in the test of the example."""
    out = tmp_path / "run.golden"
    out.write_text("last week's")
    command = ["no-such-program"] if program is None else [sys.executable, "-c", program, *arguments]
    result = RUNNER.invoke(app, ["golden", "record", "--out", str(out), "--", *command])
    if isinstance(result.exception, UsageError):
        assert code == 2
        assert says in str(result.exception)
    else:
        assert result.exit_code == code
        assert says in result.stderr
        assert read(Path(f"{out}.partial")).steps.keys() == set(range(2 if code == 7 else 3))
    assert out.read_text() == "last week's"


def test_files_that_are_none_cannot_be_checked(reference: Path, tmp_path: Path) -> None:
    code, text = _check(reference, tmp_path / "none.golden")
    assert code == 2
    assert "none.golden: cannot be read" in text
