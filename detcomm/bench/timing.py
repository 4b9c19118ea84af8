# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing: in every round each contender gets its turn, so that a disturbance meets all of them alike.

A turn is a barrier, then calls one after the other, each of which is timed: on the host by its clock, on a GPU by
events in the stream. A turn's figure is its mean time of a call; over ranks the slowest's, or what else is asked for.
Ratios are taken within a round and their median is reported, which a slow spell of the machine changes little.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Call = Callable[[], object]
OVER_RANKS: dict[int, Callable[[Sequence[float]], float]] = {
    0: lambda of_ranks: of_ranks[0],
    1: statistics.fmean,
    2: min,
    3: max,
}
"""How the times of all ranks become one, by the numbers that nccl-tests give them: rank 0, average, least, largest."""


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Args:
        rounds: turns of each contender.
        turn_s: about how long a turn takes; at least one call is made.
        most_calls: of one turn.
        iters: calls of a contender in all its turns together, in place of ``turn_s``; no more turns than that.
        warmup_iters: calls before the first turn that are not timed.
        over_ranks: a key of ``OVER_RANKS``.
    """

    rounds: int = 9
    turn_s: float = 0.1
    most_calls: int = 1000
    iters: int | None = None
    warmup_iters: int = 1
    over_ranks: int = 3


@dataclass(frozen=True)
class Ranks:
    """What timing needs from the job.

    Args:
        barrier: all ranks come, their devices idle.
        gather: every rank's numbers on every rank.
        time_calls: seconds of each of so many calls.
    """

    barrier: Callable[[], object]
    gather: Callable[[list[float]], list[list[float]]]
    time_calls: Callable[[Call, int], list[float]]


@dataclass(frozen=True)
class Times:
    """What one contender took, in seconds, equal on all ranks.

    Attributes:
        turns: mean time of a call, by round.
        calls: of each single call, all rounds together.
    """

    turns: tuple[float, ...]
    calls: tuple[float, ...]


def time_in_turns(
    calls: Sequence[Call], effort: Effort, ranks: Ranks, say: Callable[[str], object] = lambda _: None
) -> list[Times]:
    """Time each of the calls. Every rank gives as many, in the same order.

    Args:
        say: is told of each round before it.
    """
    for call in calls:
        for _ in range(effort.warmup_iters):
            call()
    if effort.iters is not None:
        plans = [_dealt(effort.iters, effort.rounds)] * len(calls)
    else:
        plans = [[_calls_per_turn(call, effort, ranks)] * effort.rounds for call in calls]
    own: list[list[float]] = [[] for _ in calls]
    num_rounds = len(plans[0]) if plans else 0
    for number in range(num_rounds):
        say(f"round {number + 1} of {num_rounds}")
        for index in _order(len(calls), number):
            ranks.barrier()
            own[index] += ranks.time_calls(calls[index], plans[index][number])
    return [_over_ranks(ranks.gather(seconds), plan, effort) for seconds, plan in zip(own, plans, strict=True)]


def _order(num_calls: int, round_number: int) -> list[int]:
    """Another start every second round, and back again in between: nobody always comes after the same other."""
    forward = [(turn + round_number // 2) % num_calls for turn in range(num_calls)]
    return forward if round_number % 2 == 0 else forward[::-1]


def _dealt(iters: int, rounds: int) -> list[int]:
    """``iters`` calls over at most ``rounds`` turns, as evenly as they go."""
    rounds = min(rounds, iters)
    return [iters // rounds + (number < iters % rounds) for number in range(rounds)]


def _calls_per_turn(call: Call, effort: Effort, ranks: Ranks) -> int:
    """How many calls fill a turn; equal on all ranks."""
    num_calls = 1
    while True:
        ranks.barrier()
        own = sum(ranks.time_calls(call, num_calls)) / num_calls
        slowest = max(seconds for (seconds,) in ranks.gather([own]))
        wanted = max(1, min(effort.most_calls, int(effort.turn_s / max(slowest, 1e-9))))
        if wanted <= 2 * num_calls:
            return wanted
        num_calls = min(wanted, 8 * num_calls)


def _over_ranks(by_rank: Sequence[Sequence[float]], plan: Sequence[int], effort: Effort) -> Times:
    combine = OVER_RANKS[effort.over_ranks]
    turns, first = [], 0
    for num_calls in plan:
        turns.append(combine([sum(own[first : first + num_calls]) / num_calls for own in by_rank]))
        first += num_calls
    return Times(tuple(turns), tuple(combine(of_ranks) for of_ranks in zip(*by_rank, strict=True)))


def host_times(call: Call, num_calls: int) -> list[float]:
    """Seconds of each call, by the host's clock."""
    stamps = [time.perf_counter()]
    for _ in range(num_calls):
        call()
        stamps.append(time.perf_counter())
    return [after - before for before, after in pairwise(stamps)]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that at least so many per cent do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-percent * len(ordered) // 100) - 1)]


def median_ratio(others: Sequence[float], ours: Sequence[float]) -> float:
    """How many times longer the others took, round by round; the median."""
    return statistics.median(other / our for other, our in zip(others, ours, strict=True))
