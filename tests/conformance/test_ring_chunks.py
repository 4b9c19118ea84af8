# SPDX-License-Identifier: Apache-2.0
"""The fixed chunks of ``ring``: any length, cut into any pieces, gives the oracle's bits by every schedule."""

import itertools

import numpy as np
import pytest

from detcomm.association import Association
from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.communicator import Communicator
from detcomm.options import Options
from detcomm.planner import PlanOptions, make_plan
from detcomm.transports import loopback
from detcomm.transports.base import Transport
from tests import inputs, oracle
from tests.conformance.run import TIMEOUT_S

COUNT = 1000
RING_CHUNKS = (1, 7, 64, 113, 120, 999, 65536)
"""One element, odd, aligned, prime, with many divisors, all but one element, all of them."""


@pytest.mark.parametrize("world_size", [3, 5, 8])
@pytest.mark.parametrize("schedule", ["oneshot", "direct", "ring"])
def test_every_chunk_length(schedule: str, world_size: int) -> None:
    leaves = inputs.make("float32", COUNT, world_size, seed=8)
    call = Call(Collective.ALL_REDUCE, DType.FLOAT32, COUNT, ReduceOp.SUM)
    contracts = list(itertools.product(RING_CHUNKS, (None, 64 * world_size, 1 << 10)))

    def body(transport: Transport) -> list[bytes]:
        results = []
        for ring_chunk, chunk_bytes in contracts:
            options = Options(
                association="ring", ring_chunk_elems=ring_chunk, schedule=schedule, chunk_bytes=chunk_bytes
            )
            output = np.zeros(4 * COUNT, np.uint8)
            communicator = Communicator(transport, options, 1, "ring chunks")
            communicator.run(call, inputs.bits(leaves[transport.rank]), output, timeout_s=TIMEOUT_S)
            results.append(output.tobytes())
        return results

    by_rank = loopback.run(world_size, body)
    for index, (ring_chunk, _) in enumerate(contracts):
        expected = oracle.reduce(leaves, "float32", "sum", association="ring", ring_chunk_elems=ring_chunk).tobytes()
        assert [results[index] == expected for results in by_rank] == [True] * world_size, contracts[index]


def test_chunk_lengths_are_part_of_the_contract() -> None:
    """The control: other chunks give other bits, so the test above can fail."""
    leaves = inputs.make("float32", COUNT, 5, seed=8)
    results = {
        oracle.reduce(leaves, "float32", "sum", association="ring", ring_chunk_elems=chunk).tobytes()
        for chunk in RING_CHUNKS
    }
    assert len(results) == len(RING_CHUNKS)


def test_a_prime_chunk_is_not_cut_into_single_elements() -> None:
    """Pieces end at the borders of chunks where they can, but never at the price of many more steps."""
    call = Call(Collective.ALL_REDUCE, DType.FLOAT32, 1 << 20, ReduceOp.SUM)
    steps = [
        len(make_plan(call, 0, 8, PlanOptions(Association("ring", chunk), chunk_bytes=1 << 20)).steps)
        for chunk in (1 << 16, 65537)
    ]
    assert steps[1] <= 2 * steps[0]
