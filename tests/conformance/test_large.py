# SPDX-License-Identifier: Apache-2.0
"""Long messages, by pairwise covering: any two of size, way, type, operation, collective and world size meet."""

import itertools
from functools import cache

import pytest

from detcomm.collectives import Collective
from tests.conformance import run
from tests.conformance.cases import Case, Way
from tests.conformance.sample import Sample

SAMPLE = Sample(counts=(65537, 1000003), world_sizes=(3, 5, 8, 2, 4, 7), chunk_bytes=(None, 1 << 14, 1 << 20))
NUM_GROUPS = 24


@cache
def _calls() -> list[tuple[int, Way, Case]]:
    return SAMPLE.calls()


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_pairwise_covering(group: int) -> None:
    for world_size, way, case in _calls()[group::NUM_GROUPS]:
        run.over_loopback(world_size, way, [case], batch=1)


@pytest.mark.parametrize("world_size", [3, 8])
def test_large_all_gather(world_size: int) -> None:
    for schedule in ("auto", "oneshot", "direct", "halving", "binomial", "ring"):
        case = Case(Collective.ALL_GATHER, "uint8", None, 1000003, in_place=schedule in ("direct", "ring"))
        association = "ring" if schedule == "ring" else "tree"
        run.over_loopback(world_size, Way(association, "float32", schedule, 1, 1 << 16), [case], batch=1)


def test_the_covering_covers() -> None:
    sizes, rows = SAMPLE.sizes, SAMPLE.rows()
    for one, other in itertools.combinations(range(len(sizes)), 2):
        met = {(row[one], row[other]) for row in rows}
        everything = itertools.product(range(sizes[one]), range(sizes[other]))
        assert met == {(i, j) for i, j in everything if SAMPLE.is_legal(one, i, other, j)}
