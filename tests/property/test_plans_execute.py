# SPDX-License-Identifier: Apache-2.0
"""Random plans, executed: any call, schedule, pieces and places in memory give the oracle's bits, and touch no more."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from detcomm.association import Association
from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.executor import execute
from detcomm.planner import PlanOptions, make_plan
from detcomm.transports import loopback
from detcomm.transports.base import Bytes, Transport
from tests import inputs, oracle
from tests.property.test_plans_fit import planned

PATIENCE_S = 120.0
GUARD = 0xA5


def _placed(data: Bytes, offset: int) -> tuple[Bytes, Bytes]:
    """The bytes somewhere between guards; and the whole of that memory."""
    memory = np.full(offset + data.size + 64, GUARD, np.uint8)
    place = memory[offset : offset + data.size]
    place[:] = data
    return place, memory


def _expected(call: Call, options: PlanOptions, given: list[NDArray[Any]], rank: int) -> NDArray[Any]:
    start, size = 0, call.count
    if call.shard_counts is not None:
        parts = list(zip(call.shard_starts, call.shard_counts, strict=True))
        if call.collective is Collective.ALL_GATHER:
            return np.concatenate([data[at : at + num] for data, (at, num) in zip(given, parts, strict=True)])
        start, size = parts[rank]
    return oracle.reduce(
        [data[start : start + size] for data in given],
        call.dtype.value,
        "sum",
        association=options.association.name,
        ring_chunk_elems=options.association.ring_chunk_elems,
        accumulate=options.accumulate,
        shard_owner=rank if call.collective is Collective.REDUCE_SCATTER else None,
    )


@settings(max_examples=100)
@given(planned().filter(lambda case: 2 <= case[1] <= 8), st.integers(0, 1000), st.data())
def test_any_plan_gives_the_bits_of_the_oracle(
    case: tuple[Call, int, PlanOptions], seed: int, data: st.DataObject
) -> None:
    call, world_size, options = case
    offsets = data.draw(st.lists(st.integers(0, 67), min_size=2 * world_size, max_size=2 * world_size))
    given_to = inputs.make(call.dtype.value, call.count, world_size, seed)

    def body(transport: Transport) -> tuple[bytes, bool]:
        rank = transport.rank
        own = given_to[rank]
        if call.collective is Collective.ALL_GATHER:
            own = own[call.shard_starts[rank] :][: call.input_count(rank)]
        source, before = _placed(inputs.bits(own), offsets[rank])
        num_bytes = call.output_count(rank) * call.dtype.itemsize
        target, after = _placed(np.full(num_bytes, GUARD, np.uint8), offsets[world_size + rank])
        kept = before.copy()
        plan = make_plan(call, rank, world_size, options)
        scratch, room = _placed(np.full(plan.scratch_bytes, GUARD, np.uint8), 64)
        execute(plan, transport, source, target, scratch, PATIENCE_S)
        result = target.tobytes()
        target[:] = GUARD
        scratch[:] = GUARD
        return result, bool((after == GUARD).all() and (room == GUARD).all() and np.array_equal(before, kept))

    results = loopback.run(world_size, body)
    assert [untouched for _, untouched in results] == [True] * world_size
    receivers = [call.root] if call.collective is Collective.REDUCE else range(world_size)
    for rank in receivers:
        assert results[rank][0] == inputs.bits(_expected(call, options, given_to, rank)).tobytes()


def test_the_inputs_tell_the_associations_apart() -> None:
    """The negative control: what the oracle expects differs, so a plan for another order would be seen."""
    call = Call(Collective.ALL_REDUCE, DType.FLOAT32, 300, ReduceOp.SUM)
    for world_size in (4, 5, 7, 8):
        given_to = inputs.make("float32", call.count, world_size, 1)
        orders = (Association("tree"), Association("linear"), Association("ring", 3))
        ways = [PlanOptions(association=order, accumulate="float32", schedule="oneshot") for order in orders]
        assert len({_expected(call, options, given_to, 0).tobytes() for options in ways}) == 3
