# SPDX-License-Identifier: Apache-2.0
"""One digest, wherever the ranks are: on one node or eight, dealt evenly or not, over calm links or bad ones.

It is the oracle's, and so the same on every machine. Eight ranks each time; the rest of the sizes is ``slow``.
"""

from collections.abc import Sequence

import pytest

from tests.multinode import digests
from tests.multinode.digests import FEW_WAYS, WAYS, Way
from tests.multinode.ranks import NodeRanks
from tests.netlab.lab import Lab

LAYOUTS = {
    "1x8": [0] * 8,
    "2x4": [0] * 4 + [1] * 4,
    "4x2": [0, 0, 1, 1, 2, 2, 3, 3],
    "8x1": [0, 1, 2, 3, 4, 5, 6, 7],
    "3+5": [0] * 3 + [1] * 5,
    "6+2": [0] * 6 + [1] * 2,
    "2x4, dealt in turn": [0, 1] * 4,
    "4x2, backwards": [3, 3, 2, 2, 1, 1, 0, 0],
    "3+5, shuffled": [1, 0, 1, 1, 0, 1, 0, 1],
    "1+2": [0, 1, 1],
    "1x4": [0] * 4,
    "2+3": [0, 0, 1, 1, 1],
    "3+3+1": [0, 0, 0, 1, 1, 1, 2],
}
"""The node of each rank."""


def check(ranks: NodeRanks, layout: str, ways: Sequence[Way]) -> None:
    placement = LAYOUTS[layout]
    world_size = len(placement)
    expected = {str(way): digests.expected(way.contract, world_size) for way in ways if legal(way, world_size)}
    legal_ways = [way for way in ways if legal(way, world_size)]
    for rank, got in enumerate(ranks.run(placement, digests.on_rank, legal_ways)):
        wrong = {way: digest for way, digest in got.items() if digest != expected[way]}
        assert not wrong, f"rank {rank}, {layout}: {wrong}, expected {expected}"
        assert got.keys() == expected.keys()


def legal(way: Way, world_size: int) -> bool:
    """Whether a schedule's radices fit the world."""
    return not way.schedule.startswith("staged") or world_size == 8


def test_the_digest_can_fail() -> None:
    """Another contract gives another digest, and so do contributions that change places."""
    contracts = {way.contract for way in WAYS}
    assert contracts == {"tree:float32", "tree:wire", "linear:float32", "ring:float32"}
    assert len({digests.expected(contract, 8) for contract in contracts}) == len(contracts)
    for contract in contracts - {"ring:float32"}:
        assert digests.expected(contract, 8, [0, 2, 1, 3, 4, 5, 6, 7]) != digests.expected(contract, 8)


@pytest.mark.parametrize("layout", ["2x4", "3+5, shuffled"])
def test_one_digest(ranks: NodeRanks, layout: str) -> None:
    check(ranks, layout, FEW_WAYS)


def test_one_digest_over_bad_links(ranks: NodeRanks, lab: Lab) -> None:
    lab.shake(delay_ms=2, jitter_ms=1, loss_percent=0.5)
    check(ranks, "4x2", FEW_WAYS[:2])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_digest_all_ways(ranks: NodeRanks, layout: str) -> None:
    check(ranks, layout, WAYS)


@pytest.mark.slow
@pytest.mark.parametrize(("delay_ms", "jitter_ms", "loss_percent"), [(3, 2, 1), (10, 9, 0), (0, 0, 3)])
@pytest.mark.parametrize("layout", ["2x4", "8x1", "6+2", "2x4, dealt in turn", "3+3+1"])
def test_one_digest_over_all_links(
    ranks: NodeRanks, lab: Lab, layout: str, delay_ms: float, jitter_ms: float, loss_percent: float
) -> None:
    lab.shake(delay_ms, jitter_ms, loss_percent)
    check(ranks, layout, FEW_WAYS)
