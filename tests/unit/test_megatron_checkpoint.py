# SPDX-License-Identifier: Apache-2.0
"""The state that travels in checkpoints: what it compares, what it refuses, what force lets through."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from detcomm.errors import UsageError
from detcomm.megatron import checkpoint, job
from detcomm.megatron.checkpoint import check_checkpoint_state, checkpoint_state
from detcomm.megatron.job import Job
from detcomm.megatron.policy import STOCK, Policy
from detcomm.megatron.replacements import Replacements
from detcomm.megatron.routing import RoutedGroup, Router
from detcomm.megatron.step_switch import StepSwitch
from detcomm.options import Options

TREE, RING = Options(), Options(association="ring")


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    yield
    if job.is_running():
        job.current().close()


def _job(
    groups: dict[str, tuple[int, Options | None]],
    options: Options = TREE,
    exact_grad_norm: bool = False,
    steps: range | None = None,
) -> Job:
    router = Router(Policy.parse("pp=stock"), options)
    for description, (size, group_options) in groups.items():
        router.record(RoutedGroup(description, tuple(range(size)), "detcomm", group_options, None))
    switch = None if steps is None else StepSwitch(steps, list)
    started = Job("detcomm", router.policy, options, 0, 8, (), exact_grad_norm, switch, router, Replacements())
    job.run(started)
    return started


USUAL: dict[str, tuple[int, Options | None]] = {
    "DATA_PARALLEL_GROUP": (4, TREE),
    "TENSOR_MODEL_PARALLEL_GROUP": (1, TREE),
    "PIPELINE_MODEL_PARALLEL_GROUP": (2, None),
}


def _saved(**changes: Any) -> Any:
    _job(USUAL)
    return json.loads(json.dumps(checkpoint_state() | changes))


def test_the_state_is_plain_and_a_run_resumes_from_its_own() -> None:
    saved = _saved()
    assert saved["groups"]["PIPELINE_MODEL_PARALLEL_GROUP"] == {"sizes": [2], "numerics_id": STOCK}
    assert check_checkpoint_state(saved) == []
    assert check_checkpoint_state(saved | {"version": "7.0"}) == [], "releases keep a numerics id's bits"


@pytest.mark.parametrize(
    ("resumed", "message"),
    [
        ({"options": RING}, r"numerics_id: saved tree/1:float32, now ring/1\[65536\]:float32"),
        ({"steps": range(3, 9)}, "steps: saved None, now 3:9"),
        ({"exact_grad_norm": True}, "gradient_norm: saved megatron, now exact/1"),
        (
            {"groups": USUAL | {"DATA_PARALLEL_GROUP": (2, TREE)}},
            "DATA_PARALLEL_GROUP: saved .* of 4 ranks, now",
        ),
        ({"groups": USUAL | {"DATA_PARALLEL_GROUP": (4, RING)}}, "DATA_PARALLEL_GROUP: saved tree/1.*, now ring/1"),
        ({"groups": USUAL | {"TENSOR_MODEL_PARALLEL_GROUP": (2, TREE)}}, "TENSOR_.*: saved no group of several ranks"),
        (
            {"groups": USUAL | {"PIPELINE_MODEL_PARALLEL_GROUP": (2, TREE)}},
            "PIPELINE_.*: saved stock of 2 ranks",
        ),
    ],
)
def test_a_resume_with_other_bits_is_refused_unless_forced(resumed: dict[str, Any], message: str) -> None:
    saved = _saved()
    _job(**({"groups": USUAL} | resumed))
    with pytest.raises(UsageError, match=message):
        check_checkpoint_state(saved)
    with pytest.warns(RuntimeWarning, match=message):
        assert len(check_checkpoint_state(saved, force=True)) == 1


def test_groups_of_one_rank_add_nothing_and_count_for_nothing() -> None:
    saved = _saved()
    _job({name: group for name, group in USUAL.items() if group[0] > 1} | {"CONTEXT_PARALLEL_GROUP": (1, RING)})
    assert check_checkpoint_state(saved) == []


@pytest.mark.parametrize(("state", "message"), [(None, "not saved under"), ({"format": 2}, "format 2, expected 1")])
def test_a_checkpoint_that_does_not_tell_is_refused(state: Any, message: str) -> None:
    _job(USUAL)
    with pytest.raises(UsageError, match=message):
        check_checkpoint_state(state)


def test_megatrons_own_loop_saves_the_state_and_compares_it() -> None:
    _job(USUAL)
    generate = checkpoint.saving(lambda args, model, iteration=None: {"args": args, "iteration": iteration})
    state_dict = generate(SimpleNamespace(), ["model"], iteration=7)
    assert state_dict["iteration"] == 7
    seen: list[Any] = []
    checkpoint.loading(force=False)(seen.append)(state_dict["args"])
    assert seen == [state_dict["args"]]
    with pytest.raises(UsageError, match="not saved under"):
        checkpoint.loading(force=False)(seen.append)(SimpleNamespace())
    with pytest.warns(RuntimeWarning, match="not saved under"):
        checkpoint.loading(force=True)(seen.append)(SimpleNamespace())
    assert len(seen) == 2


def test_without_initialize_there_is_no_state() -> None:
    with pytest.raises(UsageError, match="has not been called"):
        checkpoint_state()
