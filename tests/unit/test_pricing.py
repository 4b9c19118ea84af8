# SPDX-License-Identifier: Apache-2.0
"""The cost model: its loads are those of the plans that run, and the proof of large worlds can fail."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import pytest

from detcomm.association import TREE, Association
from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.commands.pricing import best_price, find_machine, plot_prices
from detcomm.errors import ScheduleError, UsageError
from detcomm.plan import Plan
from detcomm.planner import PlanOptions, make_plan
from detcomm.pricing import MACHINES, candidates, price, ring_price
from detcomm.pricing.fitting import Observation, fit
from detcomm.pricing.large_worlds import prove_staged
from detcomm.pricing.loads import Load, Message, all_reduce_loads
from detcomm.pricing.measured import judge
from detcomm.schedule import Cell, Step
from detcomm.schedules import Ring, Staged, parse

MACHINE = MACHINES["h200-ib"]
COUNT = 1 << 16


def _plans(schedule: str, dtype: DType, world_size: int, association: Association) -> list[Plan]:
    """Plans of one piece on all ranks."""
    call = Call(Collective.ALL_REDUCE, dtype, COUNT, ReduceOp.SUM)
    options = PlanOptions(association, "float32", schedule, chunk_bytes=1 << 30)
    return [make_plan(call, rank, world_size, options) for rank in range(world_size)]


def _measured(plans: list[Plan], node_size: int) -> Iterator[tuple[float, float, int]]:
    """Of each step the largest local bytes, network bytes and number of messages of any rank."""
    for step in range(max(len(plan.steps) for plan in plans)):
        rows = []
        for plan in plans:
            sends = plan.steps[step].sends if step < len(plan.steps) else ()
            local = [send for send in sends if send.peer // node_size == plan.rank // node_size]
            network = [send for send in sends if send not in local]
            rows.append(
                (
                    sum(send.region.num_bytes for send in local),
                    sum(send.region.num_bytes for send in network),
                    len(sends),
                )
            )
        yield max(row[0] for row in rows), max(row[1] for row in rows), max(row[2] for row in rows)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("world_size", [8, 16])
@pytest.mark.parametrize(
    "schedule", ["direct", "halving", "staged(4,4)", "staged(4,2,2)", "staged(8,2)", "oneshot", "binomial"]
)
def test_loads_are_those_of_the_plans(schedule: str, world_size: int, dtype: DType) -> None:
    node_size = 4
    plans = _plans(schedule, dtype, world_size, TREE)
    message = Message.of(COUNT * dtype.itemsize, dtype, "float32")
    loads = all_reduce_loads(parse(schedule, world_size), message, world_size, node_size)
    expected = [(load.local_bytes, load.network_bytes, load.num_messages) for load in loads]
    assert list(_measured(plans, node_size)) == expected


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_the_ring_crosses_hosts_at_one_port(dtype: DType) -> None:
    plans = _plans("ring", dtype, 8, Association("ring", 16))
    message = Message.of(COUNT * dtype.itemsize, dtype, "float32")
    loads = all_reduce_loads(Ring(), message, 8, 4)
    for (_, network, messages), load in zip(_measured(plans, 4), loads, strict=True):
        assert (network, messages) == (load.network_bytes, load.num_messages)


def test_folds_are_counted_as_they_are_planned() -> None:
    for schedule in ("direct", "staged(4,4)", "halving"):
        plan = _plans(schedule, DType.FLOAT32, 16, TREE)[5]
        loads = all_reduce_loads(parse(schedule, 16), Message(COUNT * 4), 16, 4)
        planned = [
            sum(fold.output.num_bytes + sum(part.num_bytes for part in fold.inputs) for fold in step.folds)
            for step in plan.steps
        ]
        assert planned == [load.folded_bytes for load in loads]


def test_prices_grow_with_the_message_and_the_ring_with_the_world() -> None:
    for world_size in (8, 64, 8192):
        times = [best_price(Message(float(1 << power)), world_size, MACHINE).time_us for power in range(10, 33)]
        assert times == sorted(times)
    rings = [ring_price(Message(1 << 20), world_size, MACHINE).time_us for world_size in (8, 64, 512, 4096)]
    assert rings == sorted(rings)


def test_large_messages_are_bound_by_bytes() -> None:
    """A schedule across hosts moves what a ring moves, in time: within a tenth at 64 ranks and 4 GiB."""
    message = Message(float(1 << 32))
    hierarchical = price(Staged((8, 8)), message, 64, MACHINE)
    ring = ring_price(message, 64, MACHINE)
    assert 0.8 < hierarchical.time_us / ring.time_us < 1.1
    flat = price(Staged((64,)), message, 64, MACHINE)
    assert flat.network_bytes > 7 * hierarchical.network_bytes


def test_sixteen_bit_partials_cost_twice_a_leaf() -> None:
    narrow = Message.of(1 << 20, DType.BFLOAT16, "float32")
    assert narrow.growth == 2.0
    assert Message.of(1 << 20, DType.BFLOAT16, "wire").growth == 1.0
    assert all_reduce_loads(Staged((2, 2)), narrow, 4, 1)[1] == Load(0.0, 2 * (1 << 18), 1, 2 * (1 << 19) + (1 << 18))


def test_candidates_are_legal() -> None:
    for world_size in (8, 48, 64, 1024):
        for schedule in candidates(world_size, 8):
            schedule.check(Collective.ALL_REDUCE, TREE, world_size)


def test_machines_are_found_by_name() -> None:
    assert find_machine("h200-ib", 1) is find_machine("h200-ib", 8)
    with pytest.raises(UsageError, match="expected one of h200-ib"):
        find_machine("abacus", 1)
    with pytest.raises(UsageError, match="hosts have 8 ranks"):
        find_machine("h200-ib", 4)


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_prices(tmp_path / "prices.png", MACHINE, DType.BFLOAT16, "float32")
    assert (tmp_path / "prices.png").stat().st_size > 10_000


TRUTH = replace(MACHINE, node_size=4, launch_us=3.0, local_latency_us=0.0, message_us=0.7, call_us=40.0)
"""A machine of one host, whose times make observations."""


def _observed(schedules: Sequence[str], powers: Sequence[int], noise: Sequence[float] = (1.0,)) -> list[Observation]:
    def time_us(schedule: str, size: int) -> float:
        return price(parse(schedule, 4), Message(float(size)), 4, TRUTH, pieces=(1,)).time_us

    factors = cycle(noise)
    return [
        Observation(schedule, 1 << power, time_us(schedule, 1 << power) * next(factors))
        for schedule in schedules
        for power in powers
    ]


def test_a_fit_finds_the_machine_that_made_the_times() -> None:
    found = fit(_observed(("oneshot", "direct", "halving"), (12, 18, 24, 30)), 4)
    for name in ("call_us", "launch_us", "message_us", "local_gb_per_s", "fold_gb_per_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6), name
    assert found.call_us != pytest.approx(MACHINE.call_us)


def test_nothing_that_is_fitted_is_negative() -> None:
    found = fit(_observed(("oneshot", "direct", "halving"), (12, 18, 24), noise=(0.6, 1.5, 1.0, 2.0, 0.7)), 4)
    assert min(found.call_us, found.launch_us, found.message_us) >= 0
    assert min(found.local_gb_per_s, found.fold_gb_per_s) > 0
    with pytest.raises(UsageError, match="takes as many observations, got 2"):
        fit(_observed(("direct",), (12, 18)), 4)


def test_predictions_are_judged_on_what_the_fit_has_not_seen() -> None:
    observations = _observed(("oneshot", "direct", "halving", "binomial"), (12, 16, 20, 24))
    judgement = judge(observations, 4, ("oneshot", "direct", "halving"), (1 << 12, 1 << 24))
    assert [row.predicted for row in judgement.rows].count(False) == 6
    assert judgement.median_error < 1e-6
    assert all(fastest == chosen and cost == 1.0 for fastest, chosen, cost in judgement.choices().values())

    late = [replace(one, time_us=2 * one.time_us) if one.schedule == "binomial" else one for one in observations]
    misjudged = judge(late, 4, ("oneshot", "direct", "halving"), (1 << 12, 1 << 24))
    assert {round(row.ratio, 6) for row in misjudged.rows if row.observation.schedule == "binomial"} == {0.5}


def test_the_tables_of_the_document_are_the_models() -> None:
    script = Path(__file__).parents[2] / "scripts" / "scaling"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, "run scripts/scaling" + done.stderr


def test_large_worlds_are_proved_by_stages() -> None:
    proof = prove_staged(Staged((8, 32, 4)), 1024)
    assert proof.complete
    assert proof.stages == (8, 32, 4)
    assert {0, 1, 7, 8, 1023} <= set(proof.owners)
    ragged = prove_staged(Staged((8, 32, 4)), 1000)
    assert not ragged.complete


@dataclass(frozen=True)
class _Swapped(Staged):
    """Folds the last stage in the wrong order."""

    def reduce_half(self, cell: Cell, rank: int | None = None) -> Iterator[Step]:
        for step in super().reduce_half(cell, rank):
            folds = tuple(
                fold._replace(inputs=(*fold.inputs[:-2], fold.inputs[-1], fold.inputs[-2]))
                if fold.output == cell.whole
                else fold
                for fold in step.folds
            )
            yield step._replace(folds=folds)


def test_a_wrong_schedule_is_not_proved() -> None:
    with pytest.raises(ScheduleError):
        prove_staged(_Swapped((4, 4)), 16)
