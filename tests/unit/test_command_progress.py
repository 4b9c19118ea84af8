# SPDX-License-Identifier: Apache-2.0
"""Progress goes to stderr, on the rank that speaks: line by line in a log, and not too often."""

import itertools
from types import SimpleNamespace

import pytest

from detcomm.commands import progress as module
from detcomm.commands.progress import EVERY_S, progress


def test_a_log_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=EVERY_S / 4)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with progress(True, "verifying") as say:
        for number in range(8):
            say(f"stage {number}")
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert lines[0] == "verifying: stage 3", "nothing in the first ten seconds"
    assert 1 < len(lines) < 4, lines


def test_a_rank_that_does_not_speak_tells_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(step=2 * EVERY_S)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with progress(False, "verifying") as say:
        say("a stage")
    assert capsys.readouterr() == ("", "")
