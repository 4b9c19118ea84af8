# SPDX-License-Identifier: Apache-2.0
"""Tuning is a pure function of shared values, chooses legal schedules only, and can never change a bit."""

import numpy as np
import pytest

from detcomm.association import Association
from detcomm.call import Call, even_shards
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.executor import execute
from detcomm.planner import PlanOptions, make_plan
from detcomm.transports import loopback
from detcomm.transports.base import Transport
from detcomm.tuning import choose_schedule, legal_schedules
from tests import inputs, oracle

ASSOCIATIONS = [Association("tree"), Association("linear"), Association("ring", 50)]


@pytest.mark.parametrize("association", ASSOCIATIONS, ids=lambda association: association.name)
@pytest.mark.parametrize("collective", Collective)
def test_the_choice_is_legal_for_every_size_and_world(association: Association, collective: Collective) -> None:
    for world_size in (1, 2, 3, 5, 8, 12, 16, 17, 64, 65, 256):
        for count in (0, world_size, 8192 * world_size, 1 << 26):
            count = count // world_size * world_size
            sharded = collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
            call = Call(
                collective,
                DType.FLOAT32,
                count,
                ReduceOp.SUM if collective.reduces else None,
                even_shards(count, world_size) if sharded else None,
            )
            for block_size in (1, 4, 8, 64):
                chosen = choose_schedule(call, association, world_size, block_size)
                chosen.check(collective, association, world_size)


def _all_reduce(
    association: Association, schedule: str, data: list[np.ndarray], chunk_bytes: int | None, lag: int
) -> list[bytes]:
    call = Call(Collective.ALL_REDUCE, DType.FLOAT32, data[0].size, ReduceOp.SUM)
    options = PlanOptions(association, schedule=schedule, chunk_bytes=chunk_bytes, lag=lag)

    def one_rank(transport: Transport) -> bytes:
        plan = make_plan(call, transport.rank, transport.world_size, options)
        output = np.zeros(call.count * 4, np.uint8)
        scratch = np.empty(plan.scratch_bytes, np.uint8)
        execute(plan, transport, data[transport.rank].view(np.uint8), output, scratch, timeout_s=60)
        return output.tobytes()

    return loopback.run(len(data), one_rank)


@pytest.mark.parametrize("world_size", [3, 4, 5, 7, 8])
def test_forcing_any_legal_choice_gives_the_same_bits(world_size: int) -> None:
    data = inputs.make("float32", 700, world_size)
    seen = {}
    for association in ASSOCIATIONS:
        expected = oracle.reduce(
            data,
            "float32",
            "sum",
            association=association.name,
            ring_chunk_elems=association.ring_chunk_elems,
        ).tobytes()
        call = Call(Collective.ALL_REDUCE, DType.FLOAT32, 700, ReduceOp.SUM)
        for schedule in legal_schedules(call, association, world_size, 4):
            for chunk_bytes, lag in ((None, 1), (512, 1), (512, 2)):
                results = _all_reduce(association, schedule.text, data, chunk_bytes, lag)
                assert set(results) == {expected}, f"{association.name} by {schedule.text} in {chunk_bytes}"
        seen[association.name] = expected
    # The control: on these inputs the associations do differ, so the equality above could have failed.
    assert len(set(seen.values())) == (3 if world_size > 3 else 2)
