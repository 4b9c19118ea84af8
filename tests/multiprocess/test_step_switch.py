# SPDX-License-Identifier: Apache-2.0
"""Fixed order for a range of steps: inside it detcomm's bits, outside it stock gloo's, and all ranks at one edge."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import detcomm
from tests.launch import Ranks

STEPS = range(2, 4)
NUM_ELEMS = 3 * 700
WORLD_SIZE = 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD_SIZE) as standing:
        yield standing


def _given(rank: int) -> torch.Tensor:
    """Exponents over a wide range, so that another order gives other bits in many elements."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(NUM_ELEMS, generator=generator) * 10.0 ** torch.randint(-4, 4, (NUM_ELEMS,), generator=generator)


def _collectives(group: Any, rank: int) -> dict[str, list[str]]:
    """The bits of one call of each kind that the switch turns."""
    summed, scattered, coalesced = (
        _given(rank),
        torch.empty(NUM_ELEMS // WORLD_SIZE),
        torch.empty(NUM_ELEMS // WORLD_SIZE),
    )
    gathered, reduced, listed = torch.empty(NUM_ELEMS), _given(rank), torch.empty(NUM_ELEMS // WORLD_SIZE)
    dist.all_reduce(summed, group=group, async_op=True).wait()
    dist.reduce_scatter_tensor(scattered, _given(rank), group=group)
    with dist._coalescing_manager(group, async_ops=True) as works:
        dist.reduce_scatter_tensor(coalesced, _given(rank), group=group)
    works.wait()
    dist.reduce(reduced, 0, group=group)
    dist.reduce_scatter(listed, list(_given(rank).chunk(WORLD_SIZE)), group=group)
    dist.all_gather_into_tensor(gathered, scattered, group=group)
    results = {"sum": summed, "scattered": scattered, "coalesced": coalesced, "listed": listed, "gathered": gathered}
    if rank == 0:
        results["reduced"] = reduced
    return {name: tensor.view(torch.int32).tolist() for name, tensor in results.items()}


def _train(rank: int, world_size: int) -> dict[str, Any]:
    from detcomm import megatron

    job = megatron.initialize(steps=STEPS, deterministic_kernels=False)
    fixed = _collectives(dist.new_group(backend="detcomm"), rank)
    stock = _collectives(dist.new_group(backend="gloo"), rank)
    outcome: dict[str, Any] = {"differ": fixed["sum"] != stock["sum"], "steps": []}
    for step in range(6):
        in_fixed_order = job.at_step(step)
        # What is in flight when an edge comes must end as it began.
        late = _given(rank)
        work = dist.all_reduce(late, async_op=True)
        bits = _collectives(dist.group.WORLD, rank)
        if step + 1 not in (STEPS.start, STEPS.stop):
            work.wait()
        else:
            job.at_step(step + 1)
            work.wait()
        late_bits = late.view(torch.int32).tolist()
        expected = fixed if in_fixed_order else stock
        outcome["steps"].append((in_fixed_order, bits == expected, late_bits == expected["sum"]))
    outcome["state"] = megatron.checkpoint_state()["steps"]
    outcome["notes"] = megatron.report().notes
    job.close()
    dist.destroy_process_group()
    return outcome


def test_each_step_has_the_bits_of_its_side(ranks: Ranks) -> None:
    for outcome in ranks.run(_train):
        assert outcome["differ"], "the control: the two orders give other bits"
        assert outcome["steps"] == [(step in STEPS, True, True) for step in range(6)]
        assert outcome["state"] == "2:4"
        assert "fixed order in steps 2:4 alone; now stock" in outcome["notes"]


def _disagree(rank: int, world_size: int) -> tuple[str, bool]:
    from detcomm import megatron

    job = megatron.initialize(steps=range(5 + rank // 2), deterministic_kernels=False)
    try:
        job.at_step(5 + rank // 2)
    except detcomm.MismatchError as error:
        return str(error), job.switch is not None and job.switch.fixed_order
    finally:
        job.close()
        dist.destroy_process_group()
    return "nothing", False


def test_ranks_at_different_edges_are_told_and_nothing_changes(ranks: Ranks) -> None:
    for text, unchanged in ranks.run(_disagree):
        assert unchanged
        assert "rank 0: step 5 in stock order (steps 0:5)" in text
        assert "rank 2: step 6 in stock order (steps 0:6)" in text


def test_steps_as_text() -> None:
    from detcomm.megatron.step_switch import parse_steps, steps_text

    assert parse_steps("1000:1100") == range(1000, 1100)
    assert 10**12 in parse_steps("7:")
    for text in ("0:3", "1000:1100", "7:"):
        assert steps_text(parse_steps(text)) == text
    for wrong in ("5", "5:5", "a:b", ":5", "-1:5", "1:2:3"):
        with pytest.raises(detcomm.UsageError, match="steps"):
            parse_steps(wrong)


def test_megatrons_loop_tells_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from detcomm.megatron import step_switch

    told: list[int] = []
    monkeypatch.setitem(
        __import__("sys").modules,
        "megatron.training.global_vars",
        SimpleNamespace(get_args=lambda: SimpleNamespace(curr_iteration=17)),
    )
    switch: Any = SimpleNamespace(at=told.append)
    assert step_switch.replacing(switch)(lambda model: [model, *told])("model") == ["model", 17]
