# SPDX-License-Identifier: Apache-2.0
"""One case for all contenders on the same memory: every one is checked first, then all are timed in turns."""

import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import torch
import torch.distributed as dist

from detcomm.association import Association
from detcomm.bench import numbers
from detcomm.bench.buffers import Buffers
from detcomm.bench.cases import Case, Place
from detcomm.bench.contenders import Contender
from detcomm.bench.timing import Call, Effort, Ranks, Times, host_times, time_in_turns
from detcomm.collectives import Accumulate, Collective
from detcomm.transports.base import Bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Checked:
    """What was seen of one contender's results, over all ranks, before it was timed.

    Attributes:
        num_wrong: elements, on all ranks together, that are not the right ones of contributions with exact results.
        num_other_bits: elements of the message that have other bits than specified for the same contributions, on
            any rank: what the order of additions has changed.
        digest: of those results, rank by rank.
    """

    num_wrong: int
    num_other_bits: int
    digest: str


@dataclass(frozen=True)
class Measurement:
    """One contender on one case.

    Attributes:
        checked: by place; nothing if checks were not asked for.
        times: by place; nothing where the contender was refused or wrong.
        refusals: why, by place.
    """

    case: Case
    contender: str
    checked: dict[Place, Checked] = field(default_factory=dict)
    times: dict[Place, Times] = field(default_factory=dict)
    refusals: dict[Place, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """What is alike for all cases.

    Args:
        device: where the tensors lie.
        association, accumulate: of the specified bits.
        places: which are measured; ``None`` for the usual one of each collective.
        check_iters: how often each contender is checked before it is timed; 0 for not at all.
    """

    device: torch.device
    effort: Effort
    association: Association
    accumulate: Accumulate
    places: tuple[Place, ...] | None = (Place.OUT, Place.IN)
    check_iters: int = 1


def measure(case: Case, contenders: Sequence[Contender], job: Job) -> list[Measurement]:
    """Measure all contenders on one case. Every rank calls this, inside an initialised ``torch.distributed``."""
    world_size = dist.get_world_size()
    buffers = Buffers(case, dist.get_rank(), world_size, job.device)
    measurements = [Measurement(case, contender.name) for contender in contenders]
    calls: list[tuple[Measurement, Place, Call]] = []
    for contender, own in zip(contenders, measurements, strict=True):
        for place in job.places or (case.usual_place,):
            if (refusal := contender.refusal(case, place)) is not None:
                own.refusals[place] = refusal
                continue
            call = contender.bind(case, place, buffers)
            for _ in range(job.check_iters):
                own.checked[place] = _check(case, place, call, buffers, job)
            if job.check_iters and own.checked[place].num_wrong:
                own.refusals[place] = f"{own.checked[place].num_wrong} elements are wrong"
                continue
            calls.append((own, place, call))
    buffers.clear()
    ranks = Ranks(*meeting(job.device))
    for (own, place, _), times in zip(
        calls, time_in_turns([call for _, _, call in calls], job.effort, ranks), strict=True
    ):
        own.times[place] = times
    return measurements


def _check(case: Case, place: Place, call: Call, buffers: Buffers, job: Job) -> Checked:
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def result_of(given: Bytes) -> Bytes:
        buffers.fill(place, given)
        call()
        return buffers.result(place)

    exact = result_of(numbers.exact_input(case, rank, world_size))
    hard = result_of(numbers.hard_input(case, rank, world_size))
    wrong = other = 0
    digest = b""
    if case.receives(rank):
        wrong = numbers.num_wrong(case, exact, numbers.exact_result(case, rank, world_size), world_size)
        expected = numbers.hard_result(case, rank, world_size, job.association, job.accumulate)
        other = numbers.differing_elements(hard, expected, case.dtype)
        digest = hashlib.blake2b(hard.tobytes(), digest_size=16).digest()
    told: list[tuple[int, int, bytes]] = gather((wrong, other, digest))
    over_ranks: Callable[[Iterator[int]], int] = sum if case.collective is Collective.REDUCE_SCATTER else max
    return Checked(
        num_wrong=sum(one[0] for one in told),
        num_other_bits=over_ranks(one[1] for one in told),
        digest=hashlib.blake2b(b"".join(one[2] for one in told), digest_size=8).hexdigest(),
    )


def gather(value: T) -> list[T]:
    """Every rank's value, by way of the default group, which is not among the contenders."""
    everybody: list[bytes | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, pickle.dumps(value))
    return [pickle.loads(data) for data in everybody if data is not None]


def meeting(
    device: torch.device,
) -> tuple[Callable[[], object], Callable[[list[float]], list[list[float]]], Callable[[Call, int], list[float]]]:
    """The arguments of ``Ranks`` for tensors on a device."""
    if device.type == "cpu":
        return dist.barrier, gather, host_times

    def barrier() -> None:
        torch.cuda.synchronize(device)
        dist.barrier()

    return barrier, gather, stream_times


def stream_times(call: Call, num_calls: int) -> list[float]:
    """Seconds between events around each call in the current CUDA stream."""
    new_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    events = [new_event(enable_timing=True) for _ in range(num_calls + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    events[-1].synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]
