# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing: in every round each contender gets its turn, so that a disturbance meets all of them alike.

A turn is a barrier, then as many calls as fill its time. Its figure is the time of one call on the slowest rank. Ratios
are taken within a round and their median is reported, which a slow spell of the machine changes little.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Args:
        rounds: turns of each contender.
        turn_s: about how long a turn takes; at least one call is made.
        most_calls: of one turn.
    """

    rounds: int = 9
    turn_s: float = 0.1
    most_calls: int = 1000


@dataclass(frozen=True)
class Ranks:
    """What timing needs from the job: a barrier, and every rank's numbers on every rank."""

    barrier: Callable[[], object]
    gather: Callable[[list[float]], list[list[float]]]


def time_in_turns(calls: Sequence[Callable[[], object]], effort: Effort, ranks: Ranks) -> list[list[float]]:
    """Seconds of one call, by contender and round, of the slowest rank. Equal on all ranks."""
    num_calls = [_calls_per_turn(call, effort, ranks) for call in calls]
    own: list[list[float]] = [[] for _ in calls]
    for number in range(effort.rounds):
        for turn in range(len(calls)):
            index = (turn + number) % len(calls)  # nobody always comes after the same other
            own[index].append(_time(calls[index], num_calls[index], ranks))
    everybody = [ranks.gather(seconds) for seconds in own]
    return [[max(of_round) for of_round in zip(*of_ranks, strict=True)] for of_ranks in everybody]


def _calls_per_turn(call: Callable[[], object], effort: Effort, ranks: Ranks) -> int:
    """How many calls fill a turn; equal on all ranks. Also the warm-up."""
    call()
    num_calls = 1
    while True:
        slowest = max(seconds for (seconds,) in ranks.gather([_time(call, num_calls, ranks)]))
        wanted = max(1, min(effort.most_calls, int(effort.turn_s / max(slowest, 1e-9))))
        if wanted <= 2 * num_calls:
            return wanted
        num_calls = min(wanted, 8 * num_calls)


def _time(call: Callable[[], object], num_calls: int, ranks: Ranks) -> float:
    ranks.barrier()
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - start) / num_calls


def median_ratio(others: Sequence[float], ours: Sequence[float]) -> float:
    """How many times longer the others took, round by round; the median."""
    return statistics.median(other / our for other, our in zip(others, ours, strict=True))
