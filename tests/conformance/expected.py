# SPDX-License-Identifier: Apache-2.0
"""The oracle's bits for a case, kept for all the ways that must give them.

Inputs repeat after ``inputs.PERIOD`` elements, so the oracle works on one period and its result is repeated; under
``ring``, one period for each owner, chosen by position. Knows the oracle, and nothing that it judges.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from detcomm.collectives import Collective
from tests import inputs, oracle
from tests.conformance.cases import RING_CHUNK_ELEMS, Case, Way, shards

Bytes = NDArray[np.uint8]
SEED = 3
_SMALL = 1024


def contribution(case: Case, rank: int, world_size: int) -> Bytes:
    """What one rank gives, as bytes."""
    if case.collective is Collective.ALL_GATHER:
        return inputs.bits(_leaf(case.dtype, shards(case.count, world_size)[rank], rank, world_size))
    return inputs.bits(_leaf(case.dtype, case.count, rank, world_size))


def results(way: Way, case: Case, world_size: int) -> list[Bytes]:
    """What each rank must receive, as bytes."""
    count, ranks = case.count, range(world_size)
    if case.collective is Collective.ALL_GATHER:
        return [np.concatenate([contribution(case, rank, world_size) for rank in ranks])] * world_size
    if case.collective is Collective.REDUCE_SCATTER:
        edges = np.cumsum([0, *shards(count, world_size)])
        return [
            inputs.bits(_whole(way, case, world_size, shard_owner=rank)[edges[rank] : edges[rank + 1]])
            for rank in ranks
        ]
    whole = inputs.bits(_whole(way, case, world_size))
    if case.collective is Collective.REDUCE:
        return [whole if rank == case.call(world_size).root else whole[:0] for rank in ranks]
    return [whole] * world_size


def _leaf(dtype: str, count: int, rank: int, world_size: int) -> oracle.Array:
    block = _block(dtype, rank, world_size, _SMALL if count <= _SMALL else inputs.PERIOD)
    return np.resize(block, count) if count > len(block) else block[:count]


@cache
def _block(dtype: str, rank: int, world_size: int, count: int) -> oracle.Array:
    return inputs.rank_input(dtype, count, rank, world_size, SEED)


def _whole(way: Way, case: Case, world_size: int, shard_owner: int | None = None) -> oracle.Array:
    assert case.op is not None
    count = case.count
    block_elems = _SMALL if count <= _SMALL else inputs.PERIOD
    # Only 16-bit types depend on the accumulation mode; minimum and maximum on neither mode nor order.
    accumulate = way.accumulate if case.dtype in ("bfloat16", "float16") else "float32"
    contract = (case.dtype, case.op, way.association, accumulate, world_size, block_elems)
    if way.association != "ring":
        return _repeat(_reduced(*contract, None), count)
    if shard_owner is not None:
        return _repeat(_reduced(*contract, shard_owner), count)
    real = oracle.REAL_PART.get(case.dtype, case.dtype)
    by_owner = [_repeat(_reduced(*contract, owner), count).view(oracle.storage(real)) for owner in range(world_size)]
    owners = np.arange(len(by_owner[0])) // RING_CHUNK_ELEMS % world_size
    return np.asarray(np.choose(owners, by_owner)).view(oracle.storage(case.dtype))


def _repeat(block: oracle.Array, count: int) -> oracle.Array:
    return np.resize(block, count) if count > len(block) else block[:count]


@cache
def _reduced(
    dtype: str, op: str, association: str, accumulate: str, world_size: int, count: int, owner: int | None
) -> oracle.Array:
    return oracle.reduce(
        [_block(dtype, rank, world_size, count) for rank in range(world_size)],
        dtype,
        op,
        association=association,
        accumulate=accumulate,
        factors=inputs.factors(world_size) if op == "premul_sum" else None,
        shard_owner=owner,
    )
