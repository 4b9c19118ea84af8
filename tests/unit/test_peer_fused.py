# SPDX-License-Identifier: Apache-2.0
"""Short calls in one launch on fake GPUs, the kernel compiled for the host: the oracle's bits, and who has the form."""

from typing import Any

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


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize(
    ("association", "schedule", "accumulate"),
    [
        ("tree", "oneshot", "float32"),
        ("tree", "direct", "float32"),
        ("linear", "oneshot", "wire"),
        ("linear", "direct", "float32"),
        ("tree", "direct", "wire"),
    ],
)
def test_all_reduce_has_the_bits_of_the_oracle(
    world_size: int, association: str, schedule: str, accumulate: str
) -> None:
    """Odd and short lengths, more blocks than vectors, in place and not, call after call with other blocks."""
    options = Options(association=association, schedule=schedule, accumulate=accumulate)
    rules = {"association": association, "accumulate": accumulate}
    peers = Peers(world_size)
    for count, num_blocks in ((3001, 4), (5, 16), (3001, 3), (64 * world_size, 1)):
        given = inputs.make("bfloat16", count, world_size)
        call = Call(Collective.ALL_REDUCE, DType.BFLOAT16, count, ReduceOp.SUM)
        expected = inputs.bits(oracle.reduce(given, "bfloat16", "sum", **rules))
        programs = peers.fused_programs(call, options, num_blocks)
        assert programs is not None
        for in_place in (False, True):
            outcome = peers.run(call, options, [inputs.bits(one) for one in given], in_place, programs=programs)
            for output, gpu in zip(outcome.outputs, outcome.gpus, strict=True):
                assert np.array_equal(output, expected)
                assert [name for name, *_ in gpu.calls] == ["cuCtxSetCurrent", "cuLaunchKernel"]
        if world_size > 2 and count == 3001:
            other = oracle.reduce(given, "bfloat16", "sum", association="ring", ring_chunk_elems=64)
            assert not np.array_equal(inputs.bits(other), expected), "these inputs show no order"


@pytest.mark.parametrize("counts", [(331,) * 4, (700, 1, 0, 301)])
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_scatter_and_all_gather(counts: tuple[int, ...], in_place: bool) -> None:
    world_size, total = len(counts), sum(counts)
    peers = Peers(world_size)
    given = inputs.make("float32", total, world_size)
    scatter = Call(Collective.REDUCE_SCATTER, DType.FLOAT32, total, ReduceOp.AVG, counts)
    expected = inputs.bits(oracle.reduce(given, "float32", "avg"))
    data: list[Any] = [inputs.bits(one) for one in given]
    for call in (scatter, Call(Collective.ALL_GATHER, DType.FLOAT32, total, None, counts)):
        options = Options(chunk_bytes=1 << 20)
        programs = peers.fused_programs(call, options, 3)
        assert programs is not None
        data = peers.run(call, options, data, in_place and call is scatter, programs=programs).outputs
    assert all(np.array_equal(whole, expected) for whole in data)


def test_a_reduce_gives_the_root_the_result() -> None:
    given = inputs.make("float32", 501, 3)
    call = Call(Collective.REDUCE, DType.FLOAT32, 501, ReduceOp.SUM, root=1)
    peers = Peers(3)
    programs = peers.fused_programs(call, Options(schedule="oneshot"), 2)
    assert programs is not None
    outcome = peers.run(call, Options(), [inputs.bits(one) for one in given], programs=programs)
    assert np.array_equal(outcome.outputs[1], inputs.bits(oracle.reduce(given, "float32", "sum")))


@pytest.mark.parametrize(
    ("schedule", "association", "chunk_bytes"),
    [("halving", "tree", None), ("binomial", "tree", None), ("ring", "ring", None), ("direct", "tree", 1024)],
)
def test_other_plans_have_not_the_form(schedule: str, association: str, chunk_bytes: int | None) -> None:
    call = Call(Collective.ALL_REDUCE, DType.FLOAT32, 5000, ReduceOp.SUM)
    options = Options(schedule=schedule, association=association, chunk_bytes=chunk_bytes)
    assert Peers(4).fused_programs(call, options, 2) is None
