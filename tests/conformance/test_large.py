# SPDX-License-Identifier: Apache-2.0
"""Long messages, by pairwise covering: any two of size, way, type, operation, collective and world size meet."""

import itertools
from collections.abc import Iterator

import pytest

from detcomm.collectives import Collective
from tests import inputs
from tests.conformance import run
from tests.conformance.cases import ASSOCIATIONS, REDUCTIONS, SCHEDULES, Case, Way, is_legal
from tests.conformance.covering import covering

COUNTS = (65537, 1000003)
WORLD_SIZES = (3, 5, 8, 2, 4, 7)
OPS = ("sum", "avg", "premul_sum", "product", "min", "max", "band", "bor", "bxor")
CHUNK_BYTES = (None, 1 << 14, 1 << 20)
ACCUMULATE = ("float32", "wire")
ROUTES = [
    (association, schedule)
    for association, schedule in itertools.product(ASSOCIATIONS, ("auto", *SCHEDULES))
    if any(is_legal(association, schedule, world_size, 2) for world_size in (5, 8))
]

# Factors in this order; what costs more comes later within each.
_COUNT, _ROUTE, _DTYPE, _OP, _WORLD = range(5)
_SIZES = (len(COUNTS), len(ROUTES), len(inputs.DTYPES), len(OPS), len(WORLD_SIZES), len(REDUCTIONS), 2, 3, 2)


def _legal(factor: int, value: int, other: int, other_value: int) -> bool:
    if (factor, other) == (_DTYPE, _OP):
        return OPS[other_value] in inputs.legal_ops(inputs.DTYPES[value])
    if (factor, other) == (_ROUTE, _WORLD):
        return is_legal(*ROUTES[value], WORLD_SIZES[other_value], 2)
    return True


def rows() -> Iterator[tuple[int, Way, Case]]:
    """(world size, way, case) of the covering."""
    for count, route, dtype, op, world, collective, accumulate, chunk, place in covering(_SIZES, _legal):
        name = inputs.DTYPES[dtype]
        elements = COUNTS[count] // 2 if name in inputs.COMPLEX else COUNTS[count]
        way = Way(*_route(route, ACCUMULATE[accumulate]), 2, CHUNK_BYTES[chunk])
        yield WORLD_SIZES[world], way, Case(REDUCTIONS[collective], name, OPS[op], elements, bool(place))


def _route(route: int, accumulate: str) -> tuple[str, str, str]:
    association, schedule = ROUTES[route]
    return association, accumulate, schedule


_ROWS = list(rows())
_GROUPS = 24


@pytest.mark.parametrize("group", range(_GROUPS))
def test_pairwise_covering(group: int) -> None:
    for world_size, way, case in _ROWS[group::_GROUPS]:
        run.over_loopback(world_size, way, [case], batch=1)


@pytest.mark.parametrize("world_size", [3, 8])
def test_large_all_gather(world_size: int) -> None:
    for schedule in ("auto", "oneshot", "direct", "halving", "binomial", "ring"):
        case = Case(Collective.ALL_GATHER, "uint8", None, 1000003, in_place=schedule in ("direct", "ring"))
        association = "ring" if schedule == "ring" else "tree"
        run.over_loopback(world_size, Way(association, "float32", schedule, 1, 1 << 16), [case], batch=1)


def test_the_covering_covers() -> None:
    chosen = covering(_SIZES, _legal)
    for one, other in itertools.combinations(range(len(_SIZES)), 2):
        met = {(row[one], row[other]) for row in chosen}
        everything = itertools.product(range(_SIZES[one]), range(_SIZES[other]))
        assert met == {(i, j) for i, j in everything if _legal(one, i, other, j)}
