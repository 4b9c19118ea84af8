# SPDX-License-Identifier: Apache-2.0
"""Shards in the memory of the whole on a fake GPU: only in their own place may a plan work on them as they are."""

from typing import Any

import numpy as np
import pytest

from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.cuda import communicator as module
from detcomm.cuda.contribution import contribute
from detcomm.options import Options
from detcomm.request import Request
from tests import fake_gpu, inputs, oracle
from tests.fake_communicators import STREAMS, World, memory

pytestmark = fake_gpu.needs_native

_SHARD_BYTES = 64 * 4


@pytest.mark.parametrize("collective", [Collective.ALL_GATHER, Collective.REDUCE_SCATTER])
def test_shards_at_the_beginning_of_the_whole_are_staged(
    collective: Collective, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is in place on rank 0 alone."""
    world = World(3, Options(), monkeypatch)
    call = Call(collective, DType.FLOAT32, 3 * 64, ReduceOp.SUM if collective.reduces else None, (64, 64, 64))
    given = [inputs.bits(array).copy() for array in inputs.make("float32", 3 * 64, 3)]
    rooms = [room.copy() for room in given]
    staged: list[int] = []

    def stage(kernels: Any, request: Request, *places: Any) -> None:
        staged.append(kernels.device)
        contribute(kernels, request, *places)

    def run(rank: int) -> None:
        whole, shard = memory(rooms[rank]), memory(rooms[rank][:_SHARD_BYTES])
        request = Request(call, whole, shard) if collective.reduces else Request(call, shard, whole)
        world.communicators[rank].run_many([request], STREAMS, capturing=False, timeout_s=60.0, kept=[])

    monkeypatch.setattr(module, "contribute", stage)
    world.on_each(run)
    assert sorted(staged) == [1, 2]
    if collective.reduces:
        sums = inputs.bits(oracle.reduce([room.view(np.float32) for room in given], "float32", "sum"))
        shards = sums.reshape(3, _SHARD_BYTES)
        assert all(np.array_equal(room[:_SHARD_BYTES], shard) for room, shard in zip(rooms, shards, strict=True))
    else:
        expected = np.concatenate([room[:_SHARD_BYTES] for room in given])
        assert all(np.array_equal(room, expected) for room in rooms)
