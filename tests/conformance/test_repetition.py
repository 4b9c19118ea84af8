# SPDX-License-Identifier: Apache-2.0
"""A hundred repetitions with ranks that come late at random agree with the oracle, each time."""

import random
import time

import pytest

from detcomm.collectives import Collective
from tests.conformance import run
from tests.conformance.cases import Case, Way, is_legal

REPETITIONS = 100
WORLD_SIZE = 5
LONGEST_DELAY_S = 0.001

CASES = (
    Case(Collective.ALL_REDUCE, "bfloat16", "sum", 613),
    Case(Collective.REDUCE_SCATTER, "float32", "avg", 613),
    Case(Collective.REDUCE, "float16", "sum", 64),
    Case(Collective.ALL_GATHER, "uint8", None, 101),
)


class Shake:
    """Delays each exchange of each rank by a time of its own; seeded, so that a failure can be looked at again."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, rank: int, exchange: int) -> None:
        choice = random.Random(f"{self._seed} {rank} {exchange}")
        if choice.random() < 0.3:
            time.sleep(choice.random() * LONGEST_DELAY_S)


@pytest.mark.parametrize(
    ("association", "schedule"),
    [
        ("tree", "auto"),
        ("tree", "direct"),
        ("tree", "halving"),
        ("tree", "staged(2,4)"),
        ("tree", "binomial"),
        ("linear", "oneshot"),
        ("ring", "ring"),
        ("ring", "direct"),
    ],
)
def test_random_delays_change_no_bit(association: str, schedule: str) -> None:
    assert is_legal(association, schedule, WORLD_SIZE)
    way = Way(association, "float32", schedule, chunk_bytes=256)
    repeated = [case for _ in range(REPETITIONS) for case in CASES]
    run.over_loopback(WORLD_SIZE, way, repeated, batch=len(CASES), delay=Shake(seed=11))
