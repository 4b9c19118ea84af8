# SPDX-License-Identifier: Apache-2.0
"""Guarantees ``size`` and ``composition``: how a tensor is cut, and which collectives give the result, is all one.

Each test has its control: under ``ring`` the bits do depend on the position and on the collective.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.communicator import Communicator
from detcomm.options import Options
from detcomm.request import Request
from detcomm.transports import loopback
from detcomm.transports.base import Transport
from tests import inputs
from tests.conformance.run import TIMEOUT_S

Bytes = NDArray[np.uint8]
RING_CHUNK_ELEMS = 5


def _options(association: str, schedule: str = "auto") -> Options:
    return Options(association=association, ring_chunk_elems=RING_CHUNK_ELEMS, schedule=schedule)


def _splits_of(count: int) -> list[tuple[int, ...]]:
    """Every way to cut ``count`` elements into consecutive pieces."""
    splits = []
    for cuts in itertools.product((False, True), repeat=count - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), count]
        splits.append(tuple(stop - start for start, stop in itertools.pairwise(edges)))
    return splits


def _all_reduce_in_pieces(
    association: str, dtype: DType, leaves: Sequence[Bytes], splits: Sequence[Sequence[int]], *, coalesced: bool
) -> list[bytes]:
    """The all-reduce of all pieces of each split, put together again; every rank's result must be the same."""

    def body(transport: Transport) -> list[bytes]:
        communicator = Communicator(transport, _options(association), 1, "pieces")
        leaf, wholes = leaves[transport.rank], []
        for split in splits:
            output = np.zeros_like(leaf)
            requests, start = [], 0
            for count in split:
                place = slice(start, start + count * dtype.itemsize)
                call = Call(Collective.ALL_REDUCE, dtype, count, ReduceOp.SUM)
                requests.append(Request(call, leaf[place], output[place]))
                start += count * dtype.itemsize
            for batch in [requests] if coalesced else [[request] for request in requests]:
                communicator.run_many(batch, timeout_s=TIMEOUT_S)
            wholes.append(output.tobytes())
        return wholes

    first, *others = loopback.run(len(leaves), body)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("association", ["tree", "linear"])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_every_split_of_a_short_tensor(association: str, dtype: DType) -> None:
    count = 7
    for world_size in (3, 4, 5):
        leaves = [inputs.bits(leaf) for leaf in inputs.make(dtype.value, count, world_size, seed=1)]
        results = _all_reduce_in_pieces(association, dtype, leaves, _splits_of(count), coalesced=True)
        assert len(results) == 2 ** (count - 1)
        assert len(set(results)) == 1


@pytest.mark.parametrize("world_size", [3, 4, 5, 7, 8])
def test_every_cut_in_two(world_size: int) -> None:
    count = 50
    leaves = [inputs.bits(leaf) for leaf in inputs.make("float32", count, world_size, seed=2)]
    splits = [(count,), *((cut, count - cut) for cut in range(1, count))]
    assert len(set(_all_reduce_in_pieces("tree", DType.FLOAT32, leaves, splits, coalesced=False))) == 1


@pytest.mark.parametrize("world_size", [3, 4, 5, 7, 8])
def test_a_cut_does_change_a_ring(world_size: int) -> None:
    """The control: pieces start at other positions, so elements have other owners."""
    count = 50
    leaves = [inputs.bits(leaf) for leaf in inputs.make("float32", count, world_size, seed=2)]
    splits = [(count,), (RING_CHUNK_ELEMS + 1, count - RING_CHUNK_ELEMS - 1)]
    assert len(set(_all_reduce_in_pieces("ring", DType.FLOAT32, leaves, splits, coalesced=True))) == 2


def _composed(association: str, schedule: str, dtype: DType, leaves: Sequence[Bytes]) -> tuple[set[bytes], ...]:
    """The results of all-reduce, of reduce-scatter then all-gather, of reduce then broadcast, over all ranks."""
    world_size = len(leaves)
    count = leaves[0].size // dtype.itemsize
    shards = tuple(count * (rank + 1) // world_size - count * rank // world_size for rank in range(world_size))
    root = world_size - 1

    def body(transport: Transport) -> tuple[bytes, bytes, bytes]:
        communicator = Communicator(transport, _options(association, schedule), 1, "composition")
        rank, leaf = transport.rank, leaves[transport.rank]
        whole, gathered, broadcast = (np.zeros_like(leaf) for _ in range(3))
        all_reduce = Call(Collective.ALL_REDUCE, dtype, count, ReduceOp.AVG)
        communicator.run(all_reduce, leaf, whole, timeout_s=TIMEOUT_S)

        shard = np.zeros(shards[rank] * dtype.itemsize, np.uint8)
        scatter = Call(Collective.REDUCE_SCATTER, dtype, count, ReduceOp.AVG, shards)
        communicator.run(scatter, leaf, shard, timeout_s=TIMEOUT_S)
        communicator.run(Call(Collective.ALL_GATHER, dtype, count, None, shards), shard, gathered, timeout_s=TIMEOUT_S)

        # A broadcast is an all-gather to which the root alone brings something.
        result = np.zeros_like(leaf) if rank == root else leaf[:0]
        reduce = Call(Collective.REDUCE, dtype, count, ReduceOp.AVG, root=root)
        communicator.run(reduce, leaf, result, timeout_s=TIMEOUT_S)
        from_root = Call(Collective.ALL_GATHER, dtype, count, None, (*(0,) * root, count))
        communicator.run(from_root, result, broadcast, timeout_s=TIMEOUT_S)
        return whole.tobytes(), gathered.tobytes(), broadcast.tobytes()

    whole, gathered, broadcast = (set(results) for results in zip(*loopback.run(world_size, body), strict=True))
    return whole, gathered, broadcast


@pytest.mark.parametrize("world_size", [3, 4, 5, 7, 8])
@pytest.mark.parametrize(("association", "schedule"), [("tree", "halving"), ("tree", "direct"), ("linear", "auto")])
def test_composed_collectives_have_the_same_bits(association: str, schedule: str, world_size: int) -> None:
    for dtype in (DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16, DType.FLOAT16):
        leaves = [inputs.bits(leaf) for leaf in inputs.make(dtype.value, 203, world_size, seed=6)]
        whole, gathered, broadcast = _composed(association, schedule, dtype, leaves)
        assert len(whole) == 1
        assert whole == gathered == broadcast


@pytest.mark.parametrize("world_size", [3, 4, 5, 7, 8])
def test_a_ring_reduce_scatter_has_an_order_of_its_own(world_size: int) -> None:
    """The control. Reduce keeps all-reduce's bits under every association."""
    leaves = [inputs.bits(leaf) for leaf in inputs.make("float32", 203, world_size, seed=6)]
    whole, gathered, broadcast = _composed("ring", "auto", DType.FLOAT32, leaves)
    assert len(whole) == len(gathered) == 1
    assert whole != gathered
    assert whole == broadcast
