# SPDX-License-Identifier: Apache-2.0
"""The executor does what a plan says: hand-made plans, so that neither planner nor schedules are in between."""

import numpy as np
import pytest

from detcomm.call import Call, even_shards
from detcomm.collectives import Accumulate, Collective, DType, ReduceOp, partial_dtype
from detcomm.errors import PeerTimeoutError, ScheduleError, TransportError
from detcomm.executor import execute
from detcomm.plan import Copy, Fold, Message, Plan, PlanStep, Region, Space
from detcomm.transports import loopback
from detcomm.transports.loopback import LoopbackHub, LoopbackTransport
from tests import inputs, oracle


def _region(space: Space, start: int, count: int, itemsize: int) -> Region:
    return Region(space, start * itemsize, count * itemsize)


def _plan(call: Call, rank: int, world_size: int, scratch_bytes: int, *steps: PlanStep, accumulate: Accumulate) -> Plan:
    return Plan(
        call=call,
        rank=rank,
        world_size=world_size,
        numerics_id=f"tree/1:{accumulate}",
        accumulate=accumulate,
        schedule="by hand",
        schedule_fingerprint="",
        scratch_bytes=scratch_bytes,
        steps=steps,
    )


def oneshot_plan(
    rank: int, world_size: int, count: int, op: ReduceOp, dtype: DType, accumulate: Accumulate = "float32"
) -> Plan:
    """Everybody sends its input to everybody and folds all of them; the own input is packed beside the others."""
    size = dtype.itemsize
    own = _region(Space.INPUT, 0, count, size)
    slots = [_region(Space.SCRATCH, peer * count, count, size) for peer in range(world_size)]
    peers = [peer for peer in range(world_size) if peer != rank]
    step = PlanStep(
        packs=(Copy(own, slots[rank]),),
        sends=tuple(Message(peer, slots[rank]) for peer in peers),
        recvs=tuple(Message(peer, slots[peer]) for peer in peers),
        folds=(
            Fold(
                inputs=tuple(slots),
                leaves=(True,) * world_size,
                output=_region(Space.OUTPUT, 0, count, size),
                count=count,
                shape="tree",
                final=True,
            ),
        ),
    )
    call = Call(Collective.ALL_REDUCE, dtype, count, op)
    return _plan(call, rank, world_size, world_size * count * size, step, accumulate=accumulate)


def chain_plan(rank: int, count: int, accumulate: Accumulate) -> Plan:
    """Three ranks, bfloat16, ((0+1)+2): rank 1 sends the partial 0+1 to rank 2, which sends the result to all."""
    call = Call(Collective.ALL_REDUCE, DType.BFLOAT16, count, ReduceOp.AVG)
    wide = partial_dtype(ReduceOp.AVG, DType.BFLOAT16, accumulate).itemsize
    leaf, result = _region(Space.INPUT, 0, count, 2), _region(Space.OUTPUT, 0, count, 2)
    other = _region(Space.SCRATCH, 0, count, 2)
    partial = Region(Space.SCRATCH, 2 * count, wide * count)
    first_fold = Fold((other, leaf), (True, True), partial, count, "tree", final=False)
    last_fold = Fold((partial, leaf), (False, True), result, count, "tree", final=True)
    steps = {
        0: (PlanStep(sends=(Message(1, leaf),)), PlanStep(recvs=(Message(2, result),))),
        1: (
            PlanStep(recvs=(Message(0, other),), folds=(first_fold,)),
            PlanStep(sends=(Message(2, partial),)),
            PlanStep(recvs=(Message(2, result),)),
        ),
        2: (
            PlanStep(recvs=(Message(1, partial),), folds=(last_fold,)),
            PlanStep(sends=(Message(0, result), Message(1, result))),
        ),
    }[rank]
    return _plan(call, rank, 3, (2 + wide) * count, *steps, accumulate=accumulate)


def _execute(plans: list[Plan], contributions: list[np.ndarray], *, in_place: bool = False) -> list[np.ndarray]:
    def body(transport: LoopbackTransport) -> np.ndarray:
        own = inputs.bits(contributions[transport.rank]).copy()
        output = own if in_place else np.full_like(own, 0xA5)
        scratch = np.full(plans[transport.rank].scratch_bytes, 0x5A, dtype=np.uint8)
        execute(plans[transport.rank], transport, own, output, scratch, 60.0)
        return output

    return loopback.run(len(plans), body)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.INT64])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX])
@pytest.mark.parametrize("world_size", [3, 4, 5, 8])
def test_one_step_of_packs_messages_and_a_fold(world_size: int, op: ReduceOp, dtype: DType, in_place: bool) -> None:
    contributions = inputs.make(dtype.value, 257, world_size, seed=1)
    plans = [oneshot_plan(rank, world_size, 257, op, dtype) for rank in range(world_size)]
    expected = inputs.bits(oracle.reduce(contributions, dtype.value, op.value))
    for output in _execute(plans, contributions, in_place=in_place):
        np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize("accumulate", ["float32", "wire"])
def test_partials_travel_in_the_partial_type_and_only_the_last_fold_divides(accumulate: Accumulate) -> None:
    contributions = inputs.make("bfloat16", 301, 3, seed=2)
    expected = inputs.bits(oracle.reduce(contributions, "bfloat16", "avg", accumulate=accumulate))
    other = "wire" if accumulate == "float32" else "float32"
    control = inputs.bits(oracle.reduce(contributions, "bfloat16", "avg", accumulate=other))
    assert not np.array_equal(expected, control), "the inputs would not show a wrong precision"
    for output in _execute([chain_plan(rank, 301, accumulate) for rank in range(3)], contributions):
        np.testing.assert_array_equal(output, expected)


def test_unpacks_come_after_the_exchange() -> None:
    def plan(rank: int) -> Plan:
        # All-gather of two bytes each, received out of place and unpacked.
        own, theirs = Region(Space.INPUT, 0, 2), Region(Space.SCRATCH, 0, 2)
        step = PlanStep(
            sends=(Message(1 - rank, own),),
            recvs=(Message(1 - rank, theirs),),
            unpacks=(
                Copy(own, Region(Space.OUTPUT, 2 * rank, 2)),
                Copy(theirs, Region(Space.OUTPUT, 2 * (1 - rank), 2)),
            ),
        )
        call = Call(Collective.ALL_GATHER, DType.UINT8, 4, shard_counts=even_shards(4, 2))
        return _plan(call, rank, 2, 2, step, accumulate="float32")

    def body(transport: LoopbackTransport) -> list[int]:
        own = np.array([10 * transport.rank + 1, 10 * transport.rank + 2], dtype=np.uint8)
        output = np.zeros(4, dtype=np.uint8)
        execute(plan(transport.rank), transport, own, output, np.zeros(2, dtype=np.uint8), 60.0)
        return output.tolist()

    assert loopback.run(2, body) == [[1, 2, 11, 12]] * 2


def test_an_error_names_collective_schedule_rank_and_step() -> None:
    hub = LoopbackHub(3)
    plan = chain_plan(1, 8, "float32")
    own = np.zeros(16, dtype=np.uint8)
    scratch = np.zeros(plan.scratch_bytes, dtype=np.uint8)
    where = r"all_reduce\(avg, bfloat16\[8\]\), by hand, rank 1 of 3, step 1 of 3: .*"
    with pytest.raises(PeerTimeoutError, match=where + r"ranks \[0\]"):
        execute(plan, hub.transports[1], own, own, scratch, 0.01)
    hub.transports[0].close()
    with pytest.raises(TransportError, match=where + "rank 0 is lost"):
        execute(plan, hub.transports[1], own, own, scratch, 60.0)


def test_scratch_that_is_too_small_is_an_error_and_no_wrong_sum() -> None:
    def body(transport: LoopbackTransport) -> None:
        plan = oneshot_plan(transport.rank, 3, 8, ReduceOp.SUM, DType.FLOAT32)
        own = np.zeros(32, dtype=np.uint8)
        execute(plan, transport, own, own, np.zeros(plan.scratch_bytes - 1, dtype=np.uint8), 60.0)

    with pytest.raises((ScheduleError, TransportError, ValueError)):
        loopback.run(3, body)
