# SPDX-License-Identifier: Apache-2.0
"""What a call by peers' memory costs: launches, calls of the driver, memory traffic; counted and by closed formulas."""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from detcomm.call import Call, even_shards
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.cuda.peer.program import InPlace
from detcomm.options import Options
from detcomm.plan import Plan
from detcomm.pricing.loads import Message, all_reduce_loads
from detcomm.schedules import parse
from tests import fake_gpu, fake_peer_kernels, host_kernels
from tests.fake_peers import Peers

pytestmark = [
    fake_gpu.needs_native,
    pytest.mark.skipif(host_kernels.COMPILER is None, reason="no C++ compiler here"),
]

ELEMS = 840 * 64
"""A multiple of 3, 4, 5, 7 and 8, also in units of aligned elements: no shard is longer than another."""

SIZE = 4 * ELEMS


class Cost(NamedTuple):
    """Of one rank, in launches and bytes."""

    launches: int
    syncs: int
    folded: int
    copied: int
    from_peers: int


def _call(name: str, world_size: int) -> Call:
    collective = Collective(name)
    shards = None if collective is Collective.ALL_REDUCE else even_shards(ELEMS, world_size)
    return Call(collective, DType.FLOAT32, ELEMS, ReduceOp.SUM if collective.reduces else None, shards)


def _formula(name: str, schedule: str, world_size: int, is_mapped: bool) -> Cost:
    """With S bytes and N ranks; what is copied is read and written."""
    shard, others = SIZE // world_size, (world_size - 1) * SIZE // world_size
    if schedule == "oneshot":  # all that is sent is staged, since its rank overwrites it while peers read
        return Cost(4, 2, (world_size + 1) * SIZE, 2 * SIZE, (world_size - 1) * SIZE)
    if schedule == "ring":  # each of N - 1 partials: sync, fold; the first is staged, the others lie in scratch
        steps = world_size - 1  # then each of N - 1 results: stage, sync, fetch; an end
        return Cost(1 + 2 * steps + 3 * steps + 1, 2 * steps + 1, 3 * steps * shard, 2 * (1 + 2 * steps) * shard,
                    2 * others)  # fmt: skip
    folded = (world_size + 1) * shard
    if name == "all_reduce":  # stage, sync, fold, stage, sync, fetch, end
        staged = 0 if is_mapped else 2 * others + 2 * shard
        return Cost(5 if is_mapped else 7, 3, folded, staged + 2 * others, 2 * others)
    if name == "reduce_scatter":  # stage, sync, fold, end
        return Cost(3 if is_mapped else 4, 2, folded, 0 if is_mapped else 2 * others, others)
    # own part, stage, sync, fetch, end
    return Cost(4 if is_mapped else 5, 2, 0, 2 * shard + (0 if is_mapped else 2 * shard) + 2 * others, others)


def _folded(plan: Plan) -> int:
    """Bytes that a rank's folds read and write."""
    return sum(
        sum(region.num_bytes for region in (*fold.inputs, fold.output)) for step in plan.steps for fold in step.folds
    )


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes that all kernels really read and write."""
    seen = {"folded": 0, "copied": 0}
    run_fold: Callable[..., None] = fake_gpu.Kernels.run_fold
    copy: Callable[..., None] = fake_gpu.FakeGpu._copy
    peer_copy: Callable[..., None] = fake_peer_kernels.copy

    def counted_fold(kernels: Any, kernel: int, operands: Any, output: int, count: int, divisor: int) -> None:
        spec = kernels.specs[kernel]
        seen["folded"] += count * (sum(dtype.itemsize for dtype in spec.input_dtypes) + spec.output_dtype.itemsize)
        run_fold(kernels, kernel, operands, output, count, divisor)

    def counted_copy(gpu: Any, parameters: Any, num_copies: int) -> None:
        copies = ctypes.cast(parameters[0], ctypes.POINTER(ctypes.c_uint64))
        seen["copied"] += 2 * sum(copies[128 : 128 + num_copies])
        copy(gpu, parameters, num_copies)

    def counted_peer_copy(parameters: Any, num_copies: int) -> None:
        rows = ctypes.cast(parameters[0], ctypes.POINTER(fake_peer_kernels.CPeerCopies))[0]
        seen["copied"] += 2 * sum(rows.num_bytes[:num_copies])
        peer_copy(parameters, num_copies)

    monkeypatch.setattr(fake_gpu.Kernels, "run_fold", counted_fold)
    monkeypatch.setattr(fake_gpu.FakeGpu, "_copy", counted_copy)
    monkeypatch.setattr(fake_peer_kernels, "copy", counted_peer_copy)
    return seen


@pytest.mark.parametrize("world_size", [3, 8])
@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize(
    ("name", "schedule"),
    [("all_reduce", "direct"), ("all_reduce", "oneshot"), ("reduce_scatter", "direct"), ("all_gather", "direct")],
)
def test_a_call_costs_what_its_formula_says(
    name: str, schedule: str, is_mapped: bool, world_size: int, traffic: dict[str, int]
) -> None:
    call = _call(name, world_size)
    places = [InPlace(is_mapped, is_mapped)] * world_size
    peers = Peers(world_size)
    given = [np.zeros(call.input_count(rank) * 4, np.uint8) for rank in range(world_size)]
    outcome = peers.run(call, Options(schedule=schedule), given, symmetric=places)
    expected = _formula(name, schedule, world_size, is_mapped)
    for gpu, program in zip(outcome.gpus, outcome.programs, strict=True):
        counts = program.counts
        assert expected == Cost(
            counts.num_launches, counts.num_syncs, counts.folded_bytes, counts.copied_bytes, counts.peer_bytes
        )
        assert counts.num_groups == counts.sent_bytes == counts.received_bytes == 0
        assert [called for called, *_ in gpu.calls] == ["cuCtxSetCurrent", *["cuLaunchKernel"] * expected.launches]
    assert traffic == {"folded": world_size * expected.folded, "copied": world_size * expected.copied}


@pytest.mark.parametrize("world_size", [3, 8])
def test_a_ring_costs_what_its_formula_says(world_size: int, traffic: dict[str, int]) -> None:
    call = _call("all_reduce", world_size)
    options = Options(association="ring", schedule="ring", ring_chunk_elems=ELEMS // world_size)
    outcome = Peers(world_size).run(call, options, [np.zeros(SIZE, np.uint8)] * world_size)
    expected = _formula("all_reduce", "ring", world_size, False)
    for program in outcome.programs:
        counts = program.counts
        assert expected == Cost(
            counts.num_launches, counts.num_syncs, counts.folded_bytes, counts.copied_bytes, counts.peer_bytes
        )
    assert traffic == {"folded": world_size * expected.folded, "copied": world_size * expected.copied}


@pytest.mark.parametrize(
    ("schedule", "world_size"),
    [("halving", 4), ("halving", 8), ("hierarchical", 8), ("staged(2,4)", 8), ("binomial", 5), ("binomial", 8)],
)
def test_plans_of_several_steps_read_and_fold_what_the_cost_model_says(
    schedule: str, world_size: int, traffic: dict[str, int]
) -> None:
    """What the model has on the wire is read from peers, once. Binomial trees burden the ranks unequally: their sum."""
    call = _call("all_reduce", world_size)
    peers = Peers(world_size)
    options = Options(schedule=schedule)
    outcome = peers.run(call, options, [np.zeros(SIZE, np.uint8)] * world_size)
    plans = peers.plans(call, options)
    received = [sum(message.region.num_bytes for step in plan.steps for message in step.recvs) for plan in plans]
    folded = [_folded(plan) for plan in plans]
    assert [program.counts.peer_bytes for program in outcome.programs] == received
    assert [program.counts.folded_bytes for program in outcome.programs] == folded
    assert traffic["folded"] == sum(folded)
    assert traffic["copied"] == sum(program.counts.copied_bytes for program in outcome.programs)
    steps = all_reduce_loads(parse(schedule, world_size), Message.of(SIZE, DType.FLOAT32, "float32"), world_size, 1)
    if schedule == "binomial":
        assert sum(received) == 2 * (world_size - 1) * SIZE
        return
    assert received == [sum(step.network_bytes for step in steps)] * world_size
    assert folded == [sum(step.folded_bytes for step in steps)] * world_size
    assert {program.counts.num_syncs for program in outcome.programs} == {len(steps) + 1}


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("all_reduce", "direct"), ("all_reduce", "oneshot"), ("reduce_scatter", "direct"), ("all_gather", "direct")],
)
def test_a_call_in_one_launch_moves_the_same_bytes_but_what_is_stored_twice(name: str, schedule: str) -> None:
    world_size = 4
    call = _call(name, world_size)
    programs = Peers(world_size).fused_programs(call, Options(schedule=schedule), 8)
    assert programs is not None
    apart = _formula(name, schedule, world_size, False)
    for program in programs:
        counts = program.counts
        twice = SIZE // world_size if (name, schedule) == ("all_reduce", "direct") else 0
        assert counts.num_launches == 1
        assert counts.folded_bytes == apart.folded + twice
        assert counts.copied_bytes == apart.copied - 2 * twice
        assert counts.peer_bytes == apart.from_peers


def test_bytes_do_not_depend_on_the_pieces() -> None:
    """A message in seven pieces moves and folds the same bytes, in more launches."""
    call = _call("all_reduce", 4)
    whole, pieces = (
        Peers(4).programs(call, Options(schedule="direct", chunk_bytes=chunk))[0].counts for chunk in (None, SIZE // 7)
    )
    assert (pieces.folded_bytes, pieces.copied_bytes, pieces.peer_bytes) == (
        whole.folded_bytes, whole.copied_bytes, whole.peer_bytes,
    )  # fmt: skip
    assert pieces.num_launches > whole.num_launches
