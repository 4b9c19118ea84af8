# SPDX-License-Identifier: Apache-2.0
"""The recorder on one rank, and its file: what stands in it, what a crash leaves, what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from detcomm.errors import UnsupportedError, UsageError
from detcomm.golden import Recorder, digest
from detcomm.golden.file import FILE_VARIABLE, GoldenRun, read


def _train(run: Recorder, steps: int = 2, fail_at: int | None = None, compile_: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))
    trained: Any = torch.compile(model, backend="eager") if compile_ else model
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 3)).square().sum()
        loss.backward()
        optimizer.step()
        if step == fail_at:
            raise RuntimeError("the run fails")
        run.step(step, loss=loss, model=trained, optimizer=optimizer)
    return model


def _digests(run: GoldenRun, step: int, kind: str) -> dict[str, str]:
    return {name: each.digest for (own, name), each in run.steps[step].tensors.items() if own == kind}


def test_the_file_holds_what_the_model_and_the_optimizer_hold(tmp_path: Path) -> None:
    path = tmp_path / "run.golden"
    with Recorder(path, config={"seed": 0}) as recorder:
        model = _train(recorder)
        assert not path.exists(), "no name before the end"
    run = read(path)
    assert run.complete
    assert run.config == {"seed": 0}
    assert (run.environment["world_size"], run.environment["numerics"]) == (1, [])
    weights = {name: str(digest(value)) for name, value in model.named_parameters()}
    assert _digests(run, 1, "weights") == weights
    gradients = {name: str(digest(value.grad)) for name, value in model.named_parameters()}
    assert _digests(run, 1, "gradients") == gradients
    assert list(_digests(run, 1, "optimizer"))[:3] == ["0.weight.step", "0.weight.exp_avg", "0.weight.exp_avg_sq"]
    assert _digests(run, 1, "optimizer")["0.weight.step"] == str(digest(np.array(2.0, np.float32)))
    assert run.steps[0].tensors["weights", "0.weight"].form == "float32 [4, 3]"
    loss = run.steps[1].loss
    assert loss is not None
    bits = np.array([int(loss["bits"], 16)], np.uint32).view(np.float32)
    assert (loss["dtype"], float(loss["decimal"]), loss["ranks"]) == ("float32", float(bits[0]), 1)
    assert loss["digest"] == str(digest(bits))


def test_equal_runs_write_equal_files_also_compiled(tmp_path: Path) -> None:
    files = []
    for number, compile_ in enumerate((False, False, True)):
        with Recorder(tmp_path / f"{number}.golden") as recorder:
            _train(recorder, compile_=compile_)
        files.append((tmp_path / f"{number}.golden").read_bytes())
    assert len(set(files)) == 1


def test_a_failed_run_leaves_its_steps_and_the_old_file(tmp_path: Path) -> None:
    path, partial = tmp_path / "run.golden", tmp_path / "run.golden.partial"
    path.write_text("the reference of last week")
    with pytest.raises(RuntimeError, match="the run fails"), Recorder(path) as recorder:
        _train(recorder, steps=3, fail_at=2)
    assert path.read_text() == "the reference of last week"
    assert list(read(partial).steps) == [0, 1]
    assert not read(partial).complete


def test_a_file_that_a_crash_has_cut_is_usable_up_to_its_last_step(tmp_path: Path) -> None:
    path = tmp_path / "run.golden"
    with Recorder(path) as recorder:
        for step in range(2):
            recorder.step(step, loss=0.5 * step, model={"w": torch.ones(3) * step})
    content, whole = path.read_bytes(), read(path)
    first_step = content.index(b'{"step": 1, "kind"')
    for size in range(len(content)):
        path.write_bytes(content[:size])
        if size < first_step:
            with pytest.raises(UsageError, match=r"no step was recorded|names its format"):
                read(path)
        else:
            run = read(path)
            assert not run.complete
            assert run.steps == {number: whole.steps[number] for number in run.steps}
            assert set(run.steps) in ({0}, {0, 1})


def test_summaries_alone_follow_names_and_types(tmp_path: Path) -> None:
    zeros = torch.zeros(4)

    def summary(model: dict[str, torch.Tensor]) -> str:
        with Recorder(tmp_path / "run.golden", detail="summary") as recorder:
            recorder.step(0, model=model)
        run = read(tmp_path / "run.golden")
        assert not run.steps[0].tensors
        return run.steps[0].summary["weights"]

    ones = torch.ones(4)
    base = summary({"a": zeros, "b": ones})
    assert base == summary({"b": ones, "a": zeros}), "the order in which tensors come is no part of it"
    others = [
        {"a": ones, "b": zeros},
        {"a": zeros, "c": ones},
        {"a": zeros.int(), "b": ones},
        {"a": zeros.reshape(2, 2), "b": ones},
        {"a": zeros},
    ]
    assert len({base, *map(summary, others)}) == 6


def test_without_a_path_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Recorder() as recorder:
        assert not recorder.enabled
        recorder.add("weights", "w", object())
        _train(recorder)
    assert not list(tmp_path.iterdir())


def test_the_command_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "commanded.golden"))
    with Recorder(tmp_path / "own.golden") as recorder:
        _train(recorder)
    assert [path.name for path in tmp_path.iterdir()] == ["commanded.golden"]
    with pytest.raises(UsageError, match="a second recorder would write over"), Recorder() as second:
        _train(second)


def test_state_of_many_kinds_is_found_and_the_unknown_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    state = {"w": {"momentum": torch.ones(2), "history": [torch.zeros(1), 3, None], "scale": 0.5, "on": True}}
    with Recorder(tmp_path / "run.golden") as recorder:
        recorder.step(0, model=model, optimizer=state)
        with pytest.raises(UnsupportedError, match=r"optimizer state w\.text is a str"):
            recorder.step(1, optimizer={"w": {"text": "no number"}})
    names = list(_digests(read(tmp_path / "run.golden"), 0, "optimizer"))
    assert names == ["w.momentum", "w.history.0", "w.history.1", "w.scale", "w.on"]


def test_what_is_wrong_is_refused(tmp_path: Path) -> None:
    values = torch.zeros(4)
    with pytest.raises(UsageError, match="detail: expected one of tensors, summary"):
        Recorder("x", detail="all")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="replicas: expected equal or first"):
        Recorder("x", replicas="any")  # type: ignore[arg-type]
    with Recorder(tmp_path / "run.golden") as recorder:
        recorder.add("weights", "w", values)
        with pytest.raises(UsageError, match="a second time in one step"):
            recorder.add("weights", "w", values)
        with pytest.raises(UnsupportedError, match="weights of s: digest: expected a dense tensor"):
            recorder.add("weights", "s", values.to_sparse())
        with pytest.raises(UsageError, match="loss: expected one number"):
            recorder.step(3, loss=values)
        recorder.step(3)
        for step in (3, 2):
            with pytest.raises(UsageError, match="greater than 3"):
                recorder.step(step)
        with pytest.raises(UsageError, match="at least 0"):
            recorder.step(-1)
    with pytest.raises(UsageError, match="what JSON can say"), Recorder(tmp_path / "x", config={"a": values}) as other:
        other.step(0, loss=1.0)


def _changed(path: Path, old: str, new: str) -> Path:
    changed = path.with_name("changed.golden")
    text = path.read_text()
    assert old in text
    changed.write_text(text.replace(old, new, 1))
    return changed


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.golden"
    with Recorder(path) as recorder:
        recorder.step(0, model={"w": torch.ones(3)})
    wrong = str(digest(torch.zeros(3)))
    with pytest.raises(UsageError, match="does not fit its tensors"):
        read(_changed(path, str(digest(torch.ones(3))), wrong))
    with pytest.raises(UsageError, match="expected format detcomm-golden/1, got detcomm-golden/2"):
        read(_changed(path, "detcomm-golden/1", "detcomm-golden/2"))
    with pytest.raises(UsageError, match=":2: expected a line of JSON"):
        read(_changed(path, '\n{"kind"', '\n{kind"'))
    with pytest.raises(UsageError, match="not a golden run"):
        read(_changed(path, '"name": "w", "dtype"', '"dtype"'))
    with pytest.raises(UsageError, match="cannot be read"):
        read(tmp_path / "nothing")
    (tmp_path / "other").write_text(json.dumps([1]) + "\n")
    with pytest.raises(UsageError, match="expected an object"):
        read(tmp_path / "other")
