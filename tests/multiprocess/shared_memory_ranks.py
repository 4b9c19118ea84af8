# SPDX-License-Identifier: Apache-2.0
"""What a rank of the shared-memory tests does, connect and run a collective, and the comparison with the oracle."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import PrefixStore, TCPStore

from detcomm.association import Association
from detcomm.call import Call
from detcomm.collectives import Accumulate, Collective, DType, ReduceOp
from detcomm.shared_allocation import shared_empty
from detcomm.shared_memory_rendezvous import meet
from detcomm.transports.shared_memory import SharedMemoryTransport
from tests import inputs, oracle

PATIENCE_S = 120.0
_MEETINGS = count()


def connect_store() -> TCPStore:
    """A client of the run's store."""
    port = int(os.environ["MASTER_PORT"])
    return TCPStore("127.0.0.1", port, None, False, timedelta(seconds=PATIENCE_S), wait_for_workers=False)


def connect(rank: int, world_size: int, *, chunk_bytes: int | None = None) -> SharedMemoryTransport:
    """This rank's transport, through the run's store."""
    space = PrefixStore(f"meeting {next(_MEETINGS)}", connect_store())
    return meet(space, rank, world_size, chunk_bytes=chunk_bytes, timeout_s=PATIENCE_S)


@contextmanager
def connected(rank: int, world_size: int, *, chunk_bytes: int | None = None) -> Iterator[SharedMemoryTransport]:
    """``connect``, closed at the end."""
    transport = connect(rank, world_size, chunk_bytes=chunk_bytes)
    try:
        yield transport
    finally:
        transport.close()


@dataclass(frozen=True)
class Case:
    """One collective, in words that both the transport and the oracle know.

    ``alignment`` is where the input starts within a cache line, in bytes; the output starts elsewhere. The memory of
    the ranks in ``shared_on`` comes from ``detcomm.shared_empty``.
    """

    collective: str
    count: int
    dtype: str = "float32"
    op: str = "sum"
    association: str = "tree"
    ring_chunk_elems: int = 7
    accumulate: Accumulate = "float32"
    in_place: bool = False
    alignment: int = 0
    seed: int = 0
    shared_on: tuple[int, ...] = ()


def shards_of(case: Case, world_size: int) -> tuple[int, ...]:
    """Uneven shards, some of them empty; even ones where the seed is even and the count allows it."""
    if case.seed % 2 == 0 and case.count % world_size == 0:
        return (case.count // world_size,) * world_size
    random = np.random.default_rng(case.seed)
    borders = np.sort(random.integers(0, case.count + 1, world_size - 1))
    return tuple(int(size) for size in np.diff([0, *borders, case.count]))


def call_of(case: Case, world_size: int) -> Call:
    """The case as detcomm knows it."""
    collective = Collective(case.collective)
    return Call(
        collective,
        DType(case.dtype),
        case.count,
        ReduceOp(case.op) if collective.reduces else None,
        shards_of(case, world_size) if case.collective in ("reduce_scatter", "all_gather") else None,
        root=case.seed % world_size if case.collective == "reduce" else 0,
    )


def expected(case: Case, rank: int, world_size: int) -> NDArray[Any]:
    """What this rank must receive, if it receives anything, by the oracle."""
    call = call_of(case, world_size)
    given = inputs.make(case.dtype, case.count, world_size, case.seed)
    if case.collective == "all_gather":
        parts = zip(given, call.shard_starts, call.shard_counts or (), strict=True)
        return np.concatenate([data[start : start + size] for data, start, size in parts])
    start, size = 0, case.count
    if case.collective == "reduce_scatter":
        start, size = call.shard_starts[rank], call.output_count(rank)
    return oracle.reduce(
        [data[start : start + size] for data in given],
        case.dtype,
        case.op,
        association=case.association,
        ring_chunk_elems=case.ring_chunk_elems,
        accumulate=case.accumulate,
        factors=inputs.factors(world_size) if case.op == "premul_sum" else None,
        shard_owner=rank if case.collective == "reduce_scatter" else None,
    )


def run_case(transport: SharedMemoryTransport, case: Case) -> NDArray[Any]:
    """Run the case; what this rank received."""
    rank, world_size = transport.rank, transport.world_size
    call = call_of(case, world_size)
    given = inputs.rank_input(case.dtype, case.count, rank, world_size, case.seed)
    start = call.shard_starts[rank] if call.shard_counts is not None else 0
    if case.collective == "all_gather":
        given = given[start : start + call.input_count(rank)]
    data = given.view(np.uint8)
    itemsize = call.dtype.itemsize
    make = _shared if rank in case.shared_on else _private
    room = make(max(call.count * itemsize, 1) + 256)
    shift = -room.__array_interface__["data"][0] % 64 + case.alignment
    whole = room[shift : shift + call.count * itemsize]
    num_bytes = call.output_count(rank) * itemsize
    if not case.in_place:
        input, output = data, whole[:num_bytes]
        if case.alignment or case.shared_on:
            input = make(data.size + 64)[64 - case.alignment :][: data.size]
            input[:] = data
    elif case.collective == "all_gather":
        output = whole
        input = whole[start * itemsize : start * itemsize + data.size]
        input[:] = data
    else:
        whole[:] = data
        input = whole
        output = whole[start * itemsize : start * itemsize + num_bytes]
    factor = inputs.factors(world_size)[rank] if case.op == "premul_sum" else None
    collectives = transport.native_collectives
    assert collectives is not None
    association = Association(case.association, case.ring_chunk_elems)
    collectives.run(call, association, case.accumulate, input, output, factor=factor, timeout_s=PATIENCE_S)
    assert (room[:shift] == 0xA5).all(), "wrote before the output"
    assert (room[shift + max(whole.size, num_bytes) :] == 0xA5).all(), "wrote behind the output"
    return output.view(oracle.storage(case.dtype))


def _private(num_bytes: int) -> NDArray[np.uint8]:
    return np.full(num_bytes, 0xA5, np.uint8)


def _shared(num_bytes: int) -> NDArray[np.uint8]:
    room: NDArray[np.uint8] = shared_empty(num_bytes, torch.uint8).numpy()
    room[:] = 0xA5
    return room


def run_cases(rank: int, world_size: int, cases: list[Case], chunk_bytes: int | None) -> list[bytes]:
    """On a rank: digests of what it received, by case."""
    with connected(rank, world_size, chunk_bytes=chunk_bytes) as transport:
        return [_digest(run_case(transport, case)) for case in cases]


def wrong_cases(world_size: int, cases: list[Case], received: list[list[bytes]]) -> list[str]:
    """In the test's process, so that the oracle runs once: the cases in which a rank's bits are not the oracle's."""
    wrong = []
    for index, case in enumerate(cases):
        sharded = case.collective == "reduce_scatter"
        wanted = [_digest(expected(case, rank, world_size)) for rank in range(world_size if sharded else 1)]
        receivers = [case.seed % world_size] if case.collective == "reduce" else range(world_size)
        for rank in receivers:
            if received[rank][index] != wanted[rank if sharded else 0]:
                wrong.append(f"rank {rank}: {case}")
    return wrong


def _digest(array: NDArray[Any]) -> bytes:
    return hashlib.blake2b(inputs.bits(array).tobytes(), digest_size=16).digest()
