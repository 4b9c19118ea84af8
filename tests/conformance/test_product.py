# SPDX-License-Identifier: Apache-2.0
"""Every collective, operation, type, association, schedule, accumulation mode and world size against the oracle.

A plain run takes a tenth of the full product (sizes and places take turns); ``-m matrix`` takes all of it.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import pytest

from detcomm.collectives import Accumulate
from tests.conformance import run
from tests.conformance.cases import WORLD_SIZES, Way, counts, kinds, product, rotated, ways

CHUNK_BYTES = 1024
"""Messages of 1000 elements are cut into pieces of this size, on some ways."""


def _numbered_ways() -> Iterator[tuple[int, int, Way]]:
    """(world size, turn, way): turns are counted through all world sizes of an association and accumulation mode.

    Every second way is pipelined in small pieces.
    """
    turns: Counter[tuple[str, str]] = Counter()
    for world_size in WORLD_SIZES:
        for way in ways(world_size, chunks=(None,)):
            turn = turns[way.association, way.accumulate]
            turns[way.association, way.accumulate] += 1
            yield world_size, turn, replace(way, chunk_bytes=CHUNK_BYTES if turn % 2 else None)


def _name(value: object) -> str:
    if isinstance(value, Way):
        blocks = f"[{value.block_size}]" if value.block_size > 1 else ""
        pieces = "-pieces" if value.chunk_bytes else ""
        return f"{value.association}-{value.accumulate}-{value.schedule}{blocks}{pieces}"
    return str(value)


@pytest.mark.parametrize(("world_size", "turn", "way"), list(_numbered_ways()), ids=_name)
def test_rotated_product(world_size: int, turn: int, way: Way) -> None:
    run.over_loopback(world_size, way, list(rotated(way, world_size, turn)))


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk_bytes", [None, CHUNK_BYTES])
@pytest.mark.parametrize(
    ("world_size", "way"),
    [(world_size, way) for world_size in WORLD_SIZES for way in ways(world_size, chunks=(None,))],
    ids=_name,
)
def test_full_product(world_size: int, way: Way, chunk_bytes: int | None) -> None:
    way = replace(way, chunk_bytes=chunk_bytes)
    run.over_loopback(world_size, way, list(product(way, world_size)))


def test_the_rotation_leaves_no_kind_size_or_place_out() -> None:
    """Under each association, over its ways and world sizes, every kind meets every size class and place."""
    seen: dict[str, set[tuple[object, ...]]] = {"tree": set(), "linear": set(), "ring": set()}
    for world_size, turn, way in _numbered_ways():
        sizes = counts(world_size)
        for case in rotated(way, world_size, turn):
            place = (sizes.index(case.count), case.in_place)
            seen[way.association].add((way.accumulate, case.collective, case.dtype, case.op, *place))
    for association, met in seen.items():
        for accumulate in get_args(Accumulate):
            all_kinds = list(kinds(Way(association, accumulate, "auto")))
            for kind, size, in_place in itertools.product(all_kinds, range(1, 5), (False, True)):
                assert (accumulate, *kind, size, in_place) in met, (association, accumulate, kind, size, in_place)


def test_no_schedule_is_refused_where_it_must_work() -> None:
    """The product takes what the schedules call legal; this is the least that they must."""
    for world_size in (3, 5, 7, 8):
        legal = {(way.association, way.schedule) for way in ways(world_size, chunks=(None,))}
        tree = {"auto", "oneshot", "direct", "halving", "hierarchical", "staged(2,4)", "staged(4,2)", "binomial"}
        assert {("tree", schedule) for schedule in tree} <= legal
        assert {("linear", schedule) for schedule in ("auto", "oneshot", "direct")} <= legal
        assert {("ring", schedule) for schedule in ("auto", "oneshot", "direct", "ring")} <= legal
    for world_size in (5, 7, 8):
        legal = {(way.association, way.schedule) for way in ways(world_size, chunks=(None,))}
        for association in ("linear", "ring"):
            assert (association, "halving") not in legal
        assert ("tree", "ring") not in legal
