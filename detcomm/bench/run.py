# SPDX-License-Identifier: Apache-2.0
"""One case for all contenders: every one gives the right bytes first, then all are timed in turns."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from detcomm.bench.cases import Case
from detcomm.bench.contenders import Contender, memory_of
from detcomm.bench.timing import Effort, Ranks, time_in_turns
from detcomm.collectives import Collective
from detcomm.errors import DetcommError


@dataclass(frozen=True)
class Measurement:
    """One contender on one case.

    Args:
        seconds: of one call on the slowest rank, by round; empty if the contender refused the case.
        refusal: why it did.
    """

    case: Case
    contender: str
    seconds: tuple[float, ...]
    refusal: str = ""


class WrongResultError(DetcommError):
    """A contender's result is not the sum; it is not worth timing."""


def measure(cases: Sequence[Case], contenders: Sequence[Contender], effort: Effort) -> list[Measurement]:
    """Measure all contenders on all cases. Every rank calls this, inside an initialised ``torch.distributed``.

    Raises:
        WrongResultError: on the rank that received it.
    """
    ranks = Ranks(dist.barrier, _gather)
    measurements = []
    for case in cases:
        able = [contender for contender in contenders if contender.refusal(case) is None]
        for contender in able:
            _verify(contender, case)
        calls = [contender.bind(case, *_zeros(case)) for contender in able]
        seconds = dict(zip([one.name for one in able], time_in_turns(calls, effort, ranks), strict=True))
        for contender in contenders:
            refusal = contender.refusal(case) or ""
            measurements.append(Measurement(case, contender.name, tuple(seconds.get(contender.name, ())), refusal))
    return measurements


def _verify(contender: Contender, case: Case) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    input, output = memory_of(case, rank, world_size)
    contender.bind(case, input, output)()
    if case.collective is Collective.REDUCE and rank != 0:
        return
    expected = case.expected(rank, world_size)
    if not np.array_equal(output, expected):
        first = int(np.flatnonzero(output != expected)[0]) if output.size == expected.size else 0
        raise WrongResultError(f"{contender.name}: {case}: rank {rank} received a wrong byte at {first}")


def _zeros(case: Case) -> tuple["np.ndarray[tuple[int], np.dtype[np.uint8]]", ...]:
    """Memory for timing: zeros, which stay finite however often they are added, in pages that are there."""
    input, output = memory_of(case, dist.get_rank(), dist.get_world_size())
    input[:] = 0
    output[:] = 0
    return input, output


def _gather(numbers: list[float]) -> list[list[float]]:
    """By way of the default group, which is not among the contenders."""
    everybody: list[bytes | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, pickle.dumps(numbers))
    return [pickle.loads(data) for data in everybody if data is not None]
