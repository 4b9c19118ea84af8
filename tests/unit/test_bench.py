# SPDX-License-Identifier: Apache-2.0
"""The benchmark's arithmetic: right outputs, bandwidths as nccl-tests define them, ratios within rounds, bars."""

import json
from pathlib import Path

import numpy as np
import pytest

from detcomm.association import Association
from detcomm.bench import Case, Effort, Measurement, Place, Report, numbers
from detcomm.bench.alone import folds
from detcomm.bench.bars import LARGE, SMALL, case_of, judge, of_several
from detcomm.bench.compare import changes, read, unmatched
from detcomm.bench.plotting import plot
from detcomm.bench.run import Checked
from detcomm.bench.table import footer, header, legend, line
from detcomm.bench.timing import Call, Ranks, Times, host_times, median_ratio, percentile, time_in_turns
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.errors import UsageError
from detcomm.transports.base import Bytes
from tests import oracle

REDUCING = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE)
OPS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG)


def _held(case: Case, whole: Bytes, rank: int, world_size: int) -> Bytes:
    """What ``rank`` receives of the whole result."""
    if case.collective is not Collective.REDUCE_SCATTER:
        return whole
    size = whole.size // world_size
    return whole[rank * size : (rank + 1) * size]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int8", "uint16", "int64"])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_exact_results_are_the_oracles(dtype: str, world_size: int) -> None:
    for collective in REDUCING:
        for op in OPS:
            case = Case(collective, DType(dtype), 24_001, op)
            given = [numbers.exact_input(case, rank, world_size) for rank in range(world_size)]
            stored = [data.view(oracle.storage(dtype)) for data in given]
            total = oracle.reduce(stored, dtype, op.value, association="linear").view(np.uint8)
            for rank in range(world_size):
                expected = numbers.exact_result(case, rank, world_size)
                held = _held(case, total, rank, world_size)
                assert np.array_equal(expected, held) or op is ReduceOp.AVG
                assert numbers.num_wrong(case, held, expected, world_size) == 0


@pytest.mark.parametrize("association", [Association("tree"), Association("linear"), Association("ring", 100)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_specified_bits_are_the_oracles(association: Association, dtype: str) -> None:
    world_size = 5
    for collective in REDUCING:
        case = Case(collective, DType(dtype), 24_001)
        given = [numbers.hard_input(case, rank, world_size) for rank in range(world_size)]
        stored = [data.view(oracle.storage(dtype)) for data in given]
        for rank in range(world_size):
            chunk = association.ring_chunk_elems
            if association.name == "ring" and collective is Collective.REDUCE_SCATTER:
                chunk = case.received(world_size)  # the owner is the rank that receives the element
            total = oracle.reduce(stored, dtype, "sum", association=association.name, ring_chunk_elems=chunk)
            held = _held(case, total.view(np.uint8), rank, world_size)
            assert np.array_equal(numbers.hard_result(case, rank, world_size, association, "float32"), held)


def test_hard_contributions_tell_orders_apart() -> None:
    case = Case(Collective.ALL_REDUCE, DType.FLOAT32, 1 << 16)
    bits = [numbers.hard_result(case, 0, 4, Association(name), "float32") for name in ("tree", "linear")]
    assert numbers.differing_elements(*bits, case.dtype) > case.count(4) // 20


def test_what_all_ranks_gather_is_known() -> None:
    gather = Case(Collective.ALL_GATHER, DType.FLOAT32, 4001)
    assert gather.count(3) == 999
    whole = np.concatenate([numbers.exact_input(gather, rank, 3) for rank in range(3)])
    assert np.array_equal(numbers.exact_result(gather, 0, 3), whole)
    assert not np.array_equal(numbers.exact_input(gather, 0, 3), numbers.exact_input(gather, 1, 3))


def test_wrong_elements_are_counted() -> None:
    case = Case(Collective.ALL_REDUCE, DType.BFLOAT16, 200)
    right = numbers.exact_result(case, 0, 3)
    wrong = right.copy()
    wrong[[10, 11, 40]] ^= 1  # one element in both its bytes, and another
    assert numbers.num_wrong(case, wrong, right, 3) == 2
    average = Case(Collective.ALL_REDUCE, DType.FLOAT32, 400, ReduceOp.AVG)
    mean = numbers.exact_result(average, 0, 3).view(np.float32)
    assert numbers.num_wrong(average, np.nextafter(mean, np.float32(9)).view(np.uint8), mean.view(np.uint8), 3) == 0
    assert numbers.num_wrong(average, (mean * 1.001).astype(np.float32).view(np.uint8), mean.view(np.uint8), 3) > 50


def test_bus_factors_are_those_of_nccl_tests() -> None:
    factors = {collective: Case(collective, DType.FLOAT32, 64).bus_factor(4) for collective in Collective}
    assert factors == {
        Collective.ALL_REDUCE: 1.5,
        Collective.REDUCE_SCATTER: 0.75,
        Collective.ALL_GATHER: 0.75,
        Collective.REDUCE: 1.0,
    }


def _two_ranks(seconds: list[float]) -> list[list[float]]:
    return [seconds, [2 * one for one in seconds]]


def test_turns_are_interleaved_and_the_slowest_rank_counts() -> None:
    order: list[str] = []
    ranks = Ranks(lambda: None, _two_ranks, host_times)
    calls: list[Call] = [lambda: order.append("a"), lambda: order.append("b"), lambda: order.append("c")]
    said: list[str] = []
    times = time_in_turns(calls, Effort(rounds=3, turn_s=0.0), ranks, said.append)
    assert said == ["round 1 of 3", "round 2 of 3", "round 3 of 3"]
    assert [len(one.turns) for one in times] == [3, 3, 3]
    assert "".join(order[-9:]) == "abccbabca"
    assert all(seconds > 0 for one in times for seconds in one.turns)


def test_a_number_of_calls_is_dealt_over_turns() -> None:
    asked: list[int] = []

    def time_calls(call: Call, num_calls: int) -> list[float]:
        asked.append(num_calls)
        return [float(len(asked))] * num_calls

    warm: list[int] = []
    effort = Effort(rounds=3, iters=8, warmup_iters=2, over_ranks=0)
    (times,) = time_in_turns([lambda: warm.append(1)], effort, Ranks(lambda: None, _two_ranks, time_calls))
    assert asked == [3, 3, 2]
    assert len(warm) == 2
    assert times == Times((1.0, 2.0, 3.0), (1.0,) * 3 + (2.0,) * 3 + (3.0,) * 2)
    (slowest,) = time_in_turns([lambda: None], Effort(iters=1), Ranks(lambda: None, _two_ranks, lambda *_: [5.0]))
    assert slowest == Times((10.0,), (10.0,))


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.0
    assert percentile([float(value) for value in range(1, 101)], 99) == 99.0
    assert percentile([float(value) for value in range(1, 11)], 99) == 10.0


def test_a_ratio_is_taken_within_each_round() -> None:
    # A slow spell in the second round doubles both; the ratio of medians would be the same here, that of means not.
    assert median_ratio([2.0, 40.0, 2.0], [1.0, 20.0, 1.0]) == 2.0
    assert median_ratio([2.0, 4.0, 50.0], [1.0, 1.0, 1.0]) == 4.0


def _report(ours: float, gloo: float, world_size: int = 4, num_bytes: int = LARGE, digest: str = "c0ffee") -> Report:
    case = Case(Collective.ALL_REDUCE, DType.FLOAT32, num_bytes)
    taken = {"detcomm": ours, "gloo": gloo, "native": ours - 5e-6, "mpi": 2 * ours}
    measurements = [
        Measurement(
            case,
            name,
            {Place.OUT: Checked(0, 0, digest), Place.IN: Checked(0, 7 if name == "gloo" else 0, digest)},
            {Place.OUT: Times((2 * seconds,) * 3, (3 * seconds,) * 4), Place.IN: Times((seconds,) * 3, (seconds,) * 4)},
        )
        for name, seconds in taken.items()
    ]
    refused = Measurement(case, "other", refusals=dict.fromkeys(Place, "cannot"))
    return Report(world_size, "detcomm", [*measurements, refused])


def test_rows_and_bars_of_a_report() -> None:
    report = _report(0.010, 0.031)
    rows = {row["contender"]: row for row in report.rows()}
    assert rows["detcomm"]["algbw"] == pytest.approx(6.7109)
    assert rows["detcomm"]["busbw"] == pytest.approx(1.5 * 6.7109, abs=1e-3)
    assert rows["detcomm"]["out_of_place"]["median_us"] == 20_000
    assert rows["gloo"]["times_slower"] == 3.1
    assert report.refusals() == ["all_reduce float32 on other: cannot"]
    assert not report.breaches()
    content = json.loads(json.dumps(report.to_json()))
    assert [(outcome.needed, outcome.passes) for outcome in judge(content)] == [(">= 3x", True), (">= 1.8x", True)]
    assert not next(judge(_report(0.010, 0.029).to_json())).passes


def test_wrong_results_and_other_bits_of_the_subject_are_breaches() -> None:
    case = Case(Collective.REDUCE, DType.FLOAT16, 64)
    measurements = [
        Measurement(case, "detcomm", {Place.IN: Checked(0, 3, "")}),
        Measurement(case, "gloo", {Place.IN: Checked(2, 5, "")}),
    ]
    assert Report(3, "detcomm", measurements).breaches() == [
        "detcomm: reduce float16 in_place, 64 bytes: 3 elements have other bits",
        "gloo: reduce float16 in_place, 64 bytes: 2 elements are wrong",
    ]


def test_small_messages_are_judged_against_mpi_and_the_native_call() -> None:
    verdicts = {outcome.bar: outcome for outcome in judge(_report(20e-6, 500e-6, num_bytes=SMALL).to_json())}
    assert all(outcome.passes for outcome in verdicts.values())
    assert verdicts["all_reduce float32 4 KiB, torch.distributed over the native call"].reached == "5.0 us"
    assert len(verdicts) == 3


def test_what_torch_adds_is_paid_once_by_each_rank_of_a_core() -> None:
    content = _report(20e-6, 500e-6, world_size=8, num_bytes=SMALL).to_json()
    bar = "all_reduce float32 4 KiB, torch.distributed over the native call"
    for cores, needed in ((1, 48), (2, 24), (8, 6), (16, 6)):
        content["machine"]["cores"] = cores
        assert {outcome.bar: outcome for outcome in judge(content)}[bar].needed.startswith(f"<= {needed} us")
    assert case_of(bar) == ("all_reduce", "float32", "4K")
    for row in content["rows"]:
        if row["contender"] == "native":
            row["longer_us"] = -6.1
    assert not {outcome.bar: outcome for outcome in judge(content)}[bar].passes


def test_of_several_measurements_the_median_counts() -> None:
    several = [next(judge(_report(0.010, gloo).to_json())) for gloo in (0.029, 0.090, 0.031)]
    assert [outcome.passes for outcome in several] == [False, True, True]
    assert of_several(several).value == 3.1
    assert (of_several(several).passes, of_several(several).measured) == (True, 3)
    assert not of_several([several[0], several[0], several[1]]).passes


def test_folds_are_judged_by_ratio_or_by_rate_or_not_at_all() -> None:
    ratio = {
        "case": "float32 DRAM",
        "fold_gbps": 20.0,
        "ratio": 0.79,
        "least_ratio": 0.8,
        "least_gbps": 0,
        "bound": 0.85,
        "met": False,
    }
    rate = {"case": "bfloat16 L2", "fold_gbps": 41.0, "ratio": 0.4, "least_ratio": 0, "least_gbps": 40, "met": True}
    other = {"case": "float64 L2", "fold_gbps": 80.0, "ratio": 0.9, "least_ratio": 0, "least_gbps": 0, "met": True}
    assert [(outcome.needed, outcome.reached, outcome.passes) for outcome in folds([ratio, rate, other])] == [
        (">= 80%", "79% (side by side without a fold 85%)", False),
        (">= 40 GB/s", "41.0 GB/s", True),
    ]


def test_rows_stand_in_nccl_tests_columns() -> None:
    rows = _report(0.010, 0.031).rows()
    gloo = next(row for row in rows if row["contender"] == "gloo")
    names, units = header()[-2:]
    text = line(gloo)
    assert text.split() == [
        *("67108864", "16777216", "float", "sum", "-1"),
        *("62000.0", "1.08", "1.62", "0", "31000.0", "2.16", "3.25", "0"),
        *("93000.0", "31000.0", "3.10", "gloo", "7", "c0ffee"),
    ]
    for word, value in (("size", "67108864"), ("redop", "sum"), ("busbw", "1.62"), ("ratio", "3.10")):
        assert names.index(word) + len(word) == text.index(value) + len(value), word  # right-aligned beneath each other
    assert "(GB/s)" in units
    assert any("tree/1:float32" in part for part in legend("tree/1:float32"))
    assert "# Avg bus bandwidth    : 2.4354 (gloo)" in footer(rows)
    one_place = {**gloo, "out_of_place": None}
    assert line(one_place).split()[5:9] == ["N/A"] * 4


def test_two_reports_are_compared(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("old.json", "new.json")]
    files[0].write_text(json.dumps(_report(0.010, 0.031).to_json()))
    files[1].write_text(json.dumps(_report(0.012, 0.031, digest="decade").to_json()))
    old, new = map(read, files)
    found = {(change.contender, "in place" in change.what): change for change in changes(old, new)}
    assert len(found) == 8
    assert found["detcomm", True].ratio == pytest.approx(1.2)
    assert found["gloo", False].ratio == 1.0
    assert found["detcomm", False].other_bits
    assert not any(change.other_bits for change in changes(old, old))
    assert unmatched(old, new) == 0
    for content, says in (
        ("{}", "expected a report"),
        ("nonsense", "Expecting value"),
        ('{"kind": "x"}', "expected a"),
    ):
        files[1].write_text(content)
        with pytest.raises(UsageError, match=says):
            read(files[1])
    with pytest.raises(UsageError, match="world_size is 4 in the first report and 3 in the second"):
        list(changes(old, {**old, "world_size": 3}))


def test_a_report_is_drawn(tmp_path: Path) -> None:
    plot(_report(0.010, 0.031).to_json(), tmp_path / "report.svg")
    picture = (tmp_path / "report.svg").read_text()
    assert picture.count("</svg>") == 1
    assert len(picture) > 10_000
