# SPDX-License-Identifier: Apache-2.0
"""The bits of a fixed set of calls as one digest for each contract: over a group, and by the oracle.

The calls go through torch.distributed, as users make them. What the digest may depend on is the world size and the
contract (association, accumulation); nodes, transports, schedules and the network's weather are not in it. Runs on the
ranks of any launcher; as a program it prints rank 0's digests.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from tests import inputs, oracle

RING_CHUNK_ELEMS = 120
PATIENCE = timedelta(seconds=150)
SEED = 11


@dataclass(frozen=True)
class Call:
    """One collective; ``count`` is of the whole message, and for reduce-scatter and all-gather of one shard."""

    collective: str
    dtype: str
    op: str
    count: int


CALLS = (
    Call("all_reduce", "float32", "sum", 1000),
    Call("all_reduce", "float32", "sum", 65537),
    Call("all_reduce", "bfloat16", "avg", 4099),
    Call("all_reduce", "float16", "product", 7),
    Call("all_reduce", "float64", "sum", 1),
    Call("all_reduce", "int32", "sum", 513),
    Call("reduce_scatter", "float32", "sum", 257),
    Call("reduce_scatter", "bfloat16", "sum", 130),
    Call("reduce", "float32", "avg", 1000),
    Call("all_gather", "bfloat16", "", 33),
)


@dataclass(frozen=True)
class Way:
    """How a group adds (the contract) and how it goes about it (which must not matter)."""

    association: str
    accumulate: str = "float32"
    schedule: str = "auto"
    transport: str = "auto"
    chunk_bytes: int | None = None

    @property
    def contract(self) -> str:
        """What the digest may depend on, besides the world size."""
        return f"{self.association}:{self.accumulate}"

    def __str__(self) -> str:
        return f"{self.contract} {self.schedule} over {self.transport}, pieces of {self.chunk_bytes or 'any'} bytes"


FLAT = ("direct", "halving", "oneshot", "binomial")

WAYS = (
    Way("tree"),
    Way("tree", schedule="hierarchical"),
    Way("tree", schedule="hierarchical", transport="gloo"),
    Way("tree", schedule="staged(2,4)", chunk_bytes=1024),
    *(Way("tree", schedule=schedule) for schedule in FLAT),
    Way("tree", schedule="halving", transport="gloo"),
    Way("tree", accumulate="wire"),
    Way("tree", accumulate="wire", schedule="hierarchical"),
    Way("linear"),
    Way("linear", schedule="oneshot", transport="gloo"),
    Way("ring"),
    Way("ring", schedule="direct", transport="gloo", chunk_bytes=1024),
)

FEW_WAYS = (WAYS[0], WAYS[1], WAYS[3], Way("ring"), Way("tree", accumulate="wire", transport="gloo"))


def contribution(call: Call, rank: int, world_size: int) -> oracle.Array:
    """What one rank gives."""
    shards = world_size if call.collective == "reduce_scatter" else 1
    return inputs.rank_input(call.dtype, call.count * shards, rank, world_size, SEED)


def expected(contract: str, world_size: int, order: Sequence[int] | None = None) -> str:
    """The digest that the oracle computes.

    Args:
        order: whose contribution each rank gives; default: its own.
    """
    association, accumulate = contract.split(":")
    by_rank = [hashlib.sha256() for _ in range(world_size)]
    for call in CALLS:
        given = [contribution(call, rank, world_size) for rank in order or range(world_size)]
        if call.collective == "all_gather":
            results = [np.concatenate(given)] * world_size
        else:
            results = []
            for rank in range(world_size):
                if call.collective == "reduce" and rank != root(call, world_size):
                    results.append(given[0][:0])
                    continue
                scatters = call.collective == "reduce_scatter"
                part = slice(rank * call.count, (rank + 1) * call.count) if scatters else slice(None)
                results.append(
                    oracle.reduce(
                        [array[part] for array in given],
                        call.dtype,
                        call.op,
                        association=association,
                        ring_chunk_elems=RING_CHUNK_ELEMS,
                        accumulate=accumulate,
                        shard_owner=rank if scatters else None,
                    )
                )
        for digest, result in zip(by_rank, results, strict=True):
            digest.update(np.ascontiguousarray(result).tobytes())
    return _join([digest.hexdigest() for digest in by_rank])


def root(call: Call, world_size: int) -> int:
    """Who receives a reduce."""
    return call.count % world_size


def on_rank(rank: int, world_size: int, ways: Sequence[Way]) -> dict[str, str]:
    """The digests of all ranks' results, one for each way; on a rank of any launcher."""
    import torch.distributed as dist

    import detcomm
    from tests import torch_tensors

    with torch_tensors.group(timeout=PATIENCE):
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
        digests = {}
        for way in ways:
            options = detcomm.Options(
                association=way.association,
                ring_chunk_elems=RING_CHUNK_ELEMS,
                accumulate=way.accumulate,
                schedule=way.schedule,
                transport=way.transport,
                chunk_bytes=way.chunk_bytes,
            )
            group = dist.new_group(backend="detcomm", pg_options=options, timeout=PATIENCE)
            own = hashlib.sha256()
            for result in _results(rank, world_size, group):
                own.update(result)
            everybody: list[str] = [""] * world_size
            dist.all_gather_object(everybody, own.hexdigest(), group=group)
            digests[str(way)] = _join(everybody)
            dist.destroy_process_group(group)
    return digests


def _results(rank: int, world_size: int, group: object) -> Iterator[bytes]:
    import torch
    import torch.distributed as dist

    from tests.torch_tensors import bits, tensor

    for call in CALLS:
        given = tensor(contribution(call, rank, world_size), call.dtype)
        op = getattr(dist.ReduceOp, call.op.upper()) if call.op else None
        match call.collective:
            case "all_reduce":
                dist.all_reduce(given, op=op, group=group)
                yield bits(given)
            case "reduce_scatter":
                shard = torch.empty(call.count, dtype=given.dtype)
                dist.reduce_scatter_tensor(shard, given, op=op, group=group)
                yield bits(shard)
            case "reduce":
                dist.reduce(given, dst=root(call, world_size), op=op, group=group)
                if rank == root(call, world_size):
                    yield bits(given)
            case "all_gather":
                gathered = torch.empty(world_size * call.count, dtype=given.dtype)
                dist.all_gather_into_tensor(gathered, given, group=group)
                yield bits(gathered)


def _join(digests: Sequence[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _main() -> None:
    """A program for torchrun, mpirun and srun: rank 0 writes the digests of the ways given as JSON."""
    import detcomm  # noqa: F401 - fills torch's variables from other launchers'

    ways = [Way(**fields) for fields in json.loads(sys.argv[1])]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    digests = on_rank(rank, world_size, ways)
    if rank == 0:
        print("digests", json.dumps(digests), flush=True)


if __name__ == "__main__":
    _main()
