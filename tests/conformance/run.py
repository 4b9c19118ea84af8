# SPDX-License-Identifier: Apache-2.0
"""Run cases on one rank's communicator and compare every byte with what the oracle says.

The memory of a case lies between guards and at an odd place, the output is filled with a pattern first, and an input
that is not also the output must be as it was. Knows no transport: the same code judges loopback, gloo, MPI and more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detcomm.collectives import Collective, DType
from detcomm.communicator import Communicator
from detcomm.request import Request
from detcomm.transports import loopback
from detcomm.transports.base import Transport
from tests import inputs
from tests.conformance import expected
from tests.conformance.cases import Case, Way, shards

Bytes = NDArray[np.uint8]
TIMEOUT_S = 120.0
GUARD = 0xA5
BATCH = 64
"""Calls that share one agreement, where a test has thousands of them."""


@dataclass(frozen=True)
class Trial:
    """One case on one rank: its memory, and what must be there afterwards."""

    case: Case
    request: Request
    memory: tuple[Bytes, ...]
    after: tuple[Bytes, ...]


def trial(case: Case, rank: int, world_size: int, result: Bytes) -> Trial:
    """Lay out the memory of a case; ``result`` is what the rank must receive."""
    call = case.call(world_size)
    contribution = expected.contribution(case, rank, world_size)
    itemsize = DType(case.dtype).itemsize
    sharded = case.collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
    start = sum(shards(case.count, world_size)[:rank]) * itemsize if sharded else 0
    factor = inputs.factors(world_size)[rank] if case.op == "premul_sum" else None
    if case.in_place:
        # The larger of the two holds the other: both begin together, or at this rank's shard.
        memory, room = _guarded(max(contribution.size, result.size), itemsize)
        smaller = slice(start, start + min(contribution.size, result.size))
        gathers = case.collective is Collective.ALL_GATHER
        input, output = (room[smaller], room) if gathers else (room, room[smaller])
        input[:] = contribution
        after = memory.copy()
        (after[itemsize:][: room.size] if gathers else after[itemsize:][smaller])[:] = result
        # Of an input that is overwritten in part the rest may stay or go; only its guards are promised.
        if case.collective is Collective.REDUCE_SCATTER:
            memory_kept: tuple[Bytes, ...] = (output, memory[:itemsize], memory[itemsize + room.size :])
            after_kept: tuple[Bytes, ...] = (
                result,
                after[:itemsize],
                after[itemsize + room.size :],
            )
        else:
            memory_kept, after_kept = (memory,), (after,)
    else:
        input_memory, input = _guarded(contribution.size, itemsize)
        output_memory, output = _guarded(result.size, itemsize)
        input[:] = contribution
        output_after = output_memory.copy()
        output_after[itemsize:][: result.size] = result
        memory_kept, after_kept = (output_memory, input_memory), (output_after, input_memory.copy())
    label = case.dtype if case.dtype != call.dtype.value else ""
    return Trial(case, Request(call, input, output, factor, label), memory_kept, after_kept)


def check(
    communicator: Communicator,
    way: Way,
    cases: Sequence[Case],
    *,
    batch: int = BATCH,
    results: Sequence[Sequence[Bytes]] | None = None,
) -> None:
    """Run cases and compare, on every rank of a group at the same time.

    Args:
        batch: calls that share one agreement.
        results: what each rank must receive, for each case; by default the oracle is asked.

    Raises:
        AssertionError: naming way, case, rank, byte, expected and got.
    """
    rank, world_size = communicator.rank, communicator.world_size
    for first in range(0, len(cases), batch):
        trials = []
        for index, case in enumerate(cases[first : first + batch], first):
            by_rank = results[index] if results else expected.results(way, case, world_size)
            trials.append(trial(case, rank, world_size, by_rank[rank]))
        if batch == 1:
            request = trials[0].request
            communicator.run(
                request.call,
                request.input,
                request.output,
                factor=request.factor,
                label=request.label,
                timeout_s=TIMEOUT_S,
            )
        else:
            communicator.run_many([each.request for each in trials], timeout_s=TIMEOUT_S)
        for each in trials:
            _compare(each, way, rank, world_size)


def over_loopback(
    world_size: int, way: Way, cases: Sequence[Case], *, batch: int = BATCH, delay: loopback.Delay | None = None
) -> None:
    """``check`` on all ranks of a group in this process."""
    results = [expected.results(way, case, world_size) for case in cases]  # once for all ranks

    def body(transport: Transport) -> None:
        communicator = Communicator(transport, way.options, way.block_size, "conformance")
        check(communicator, way, cases, batch=batch, results=results)

    loopback.run(world_size, body, delay=delay)


def _guarded(num_bytes: int, guard_bytes: int) -> tuple[Bytes, Bytes]:
    """Memory with a guard of one element on both sides, and the room between them."""
    memory = np.full(num_bytes + 2 * guard_bytes, GUARD, np.uint8)
    return memory, memory[guard_bytes : guard_bytes + num_bytes]


def _compare(trial: Trial, way: Way, rank: int, world_size: int) -> None:
    for memory, after in zip(trial.memory, trial.after, strict=True):
        if not np.array_equal(memory, after):
            at = int(np.flatnonzero(memory != after)[0])
            itemsize = DType(trial.case.dtype).real.itemsize
            element = slice(at // itemsize * itemsize, (at // itemsize + 1) * itemsize)
            raise AssertionError(
                f"{way}, {trial.case}, rank {rank} of {world_size}: byte {at} of {memory.size} is the first that "
                f"differs, expected {after[element][::-1].tobytes().hex()}, got "
                f"{memory[element][::-1].tobytes().hex()} (most significant first; a guard of one element precedes)"
            )
