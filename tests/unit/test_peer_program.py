# SPDX-License-Identifier: Apache-2.0
"""Programs whose ranks read each other's memory, run natively on fake GPUs: the oracle's bits, whatever lies where."""

import numpy as np
import pytest

from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.options import Options
from tests import fake_gpu, host_kernels, inputs, oracle
from tests.fake_peers import Peers

pytestmark = [
    fake_gpu.needs_native,
    pytest.mark.skipif(host_kernels.COMPILER is None, reason="no C++ compiler here"),
]

SCHEDULES = [
    ("tree", "direct"), ("tree", "halving"), ("tree", "oneshot"), ("tree", "binomial"), ("tree", "hierarchical"),
    ("linear", "direct"), ("linear", "oneshot"), ("ring", "ring"), ("ring", "direct"),
]  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize(("association", "schedule"), SCHEDULES)
@pytest.mark.parametrize("chunk_bytes", [1024, None])
def test_all_reduce_has_the_bits_of_the_oracle(
    world_size: int, association: str, schedule: str, chunk_bytes: int | None
) -> None:
    options = Options(association=association, schedule=schedule, ring_chunk_elems=64, chunk_bytes=chunk_bytes)
    count = 3001
    given = inputs.make("bfloat16", count, world_size)
    call = Call(Collective.ALL_REDUCE, DType.BFLOAT16, count, ReduceOp.SUM)
    expected = inputs.bits(oracle.reduce(given, "bfloat16", "sum", association=association, ring_chunk_elems=64))
    peers = Peers(world_size)
    for in_place in (False, True, True):
        outcome = peers.run(call, options, [inputs.bits(one) for one in given], in_place)
        for output in outcome.outputs:
            assert np.array_equal(output, expected)
        assert not any(name.startswith("nccl") for gpu in outcome.gpus for name, *_ in gpu.calls)
    if world_size > 2:
        other = oracle.reduce(
            given, "bfloat16", "sum", association="tree" if association == "ring" else "ring", ring_chunk_elems=64
        )
        assert not np.array_equal(inputs.bits(other), expected), "these inputs show no order"
