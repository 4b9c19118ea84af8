# SPDX-License-Identifier: Apache-2.0
"""The benchmark's arithmetic: right outputs, bandwidths as nccl-tests define them, ratios within rounds, bars."""

import json

import numpy as np
import pytest

from detcomm.bench import Case, Effort, Measurement, Report
from detcomm.bench.bars import LARGE, SMALL, judge
from detcomm.bench.timing import Ranks, median_ratio, time_in_turns
from detcomm.collectives import Collective, DType
from tests import oracle


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_expected_output_is_the_oracles(dtype: str, world_size: int) -> None:
    for collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER):
        case = Case(collective, DType(dtype), 4001)
        given = [case.input(rank, world_size).view(oracle.storage(dtype)) for rank in range(world_size)]
        total = oracle.reduce(given, dtype, "sum", association="linear")
        for rank in range(world_size):
            size = total.size // world_size
            part = total[rank * size : (rank + 1) * size] if collective is Collective.REDUCE_SCATTER else total
            assert np.array_equal(case.expected(rank, world_size), part.view(np.uint8))
    gather = Case(Collective.ALL_GATHER, DType(dtype), 4001)
    whole = np.concatenate([gather.input(rank, world_size) for rank in range(world_size)])
    assert np.array_equal(gather.expected(0, world_size), whole)


def test_ranks_give_different_inputs() -> None:
    case = Case(Collective.ALL_REDUCE, DType.FLOAT32, 4096)
    assert not np.array_equal(case.input(0, 2), case.input(1, 2))


def test_bus_factors_are_those_of_nccl_tests() -> None:
    factors = {collective: Case(collective, DType.FLOAT32, 64).bus_factor(4) for collective in Collective}
    assert factors == {
        Collective.ALL_REDUCE: 1.5,
        Collective.REDUCE_SCATTER: 0.75,
        Collective.ALL_GATHER: 0.75,
        Collective.REDUCE: 1.0,
    }


def test_turns_are_interleaved_and_the_slowest_rank_counts() -> None:
    order: list[str] = []
    ranks = Ranks(lambda: None, lambda numbers: [numbers, [2 * number for number in numbers]])
    calls = [lambda: order.append("a"), lambda: order.append("b"), lambda: order.append("c")]
    seconds = time_in_turns(calls, Effort(rounds=3, turn_s=0.0), ranks)
    assert [len(of_rounds) for of_rounds in seconds] == [3, 3, 3]
    assert "".join(order[-9:]) == "abcbcacab"
    assert all(value > 0 for of_rounds in seconds for value in of_rounds)


def test_a_ratio_is_taken_within_each_round() -> None:
    # A slow spell in the second round doubles both; the ratio of medians would be the same here, that of means not.
    assert median_ratio([2.0, 40.0, 2.0], [1.0, 20.0, 1.0]) == 2.0
    assert median_ratio([2.0, 4.0, 50.0], [1.0, 1.0, 1.0]) == 4.0


def _report(ours: float, gloo: float, world_size: int = 4, num_bytes: int = LARGE) -> Report:
    case = Case(Collective.ALL_REDUCE, DType.FLOAT32, num_bytes)
    taken = {"detcomm": ours, "gloo": gloo, "native": ours - 5e-6, "mpi": 2 * ours}
    measurements = [Measurement(case, name, (seconds,) * 3) for name, seconds in taken.items()]
    return Report(world_size, "detcomm", [*measurements, Measurement(case, "other", (), "cannot")])


def test_rows_and_bars_of_a_report() -> None:
    report = _report(0.010, 0.031)
    rows = {row["contender"]: row for row in report.rows()}
    assert rows["detcomm"]["algbw"] == pytest.approx(6.7109)
    assert rows["detcomm"]["busbw"] == pytest.approx(1.5 * 6.7109, abs=1e-3)
    assert rows["gloo"]["times_slower"] == 3.1
    assert report.refusals() == ["all_reduce float32 on other: cannot"]
    content = json.loads(json.dumps(report.to_json()))
    assert [(outcome.needed, outcome.passes) for outcome in judge(content)] == [(">= 3x", True), (">= 1.8x", True)]
    assert not next(judge(_report(0.010, 0.029).to_json())).passes


def test_small_messages_are_judged_against_mpi_and_the_native_call() -> None:
    verdicts = {outcome.bar: outcome for outcome in judge(_report(20e-6, 500e-6, num_bytes=SMALL).to_json())}
    assert all(outcome.passes for outcome in verdicts.values())
    assert verdicts["all_reduce float32 4 KiB, torch.distributed over the native call"].reached == "5.0 us"
    assert len(verdicts) == 3
