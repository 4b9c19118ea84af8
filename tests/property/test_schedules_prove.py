# SPDX-License-Identifier: Apache-2.0
"""For every schedule, association and world: the additions done are those promised, the bytes the formula's."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detcomm.association import LINEAR, TREE, Association
from detcomm.collectives import Collective
from detcomm.schedule import Cell, Schedule
from detcomm.schedules import Binomial, Oneshot, Ring, Staged, direct, halving, hierarchical
from detcomm.simulate import cells, prove

RING = Association("ring")


def pairs(world_size: int) -> list[tuple[Schedule, Association]]:
    """Every schedule family with every association that it implements."""
    over_tree: list[Schedule] = [Oneshot(), direct(world_size), halving(world_size), Binomial()]
    over_tree += [hierarchical(world_size, block) for block in (2, 4, 8)]
    return [
        *((schedule, TREE) for schedule in dict.fromkeys(over_tree)),
        *((schedule, LINEAR) for schedule in (Oneshot(), direct(world_size))),
        *((schedule, RING) for schedule in (Oneshot(), direct(world_size), Ring())),
    ]


@pytest.mark.parametrize("collective", Collective)
@pytest.mark.parametrize("worlds", [range(1, 17), range(17, 33), range(33, 49), range(49, 65)], ids=str)
def test_all_worlds_up_to_64(collective: Collective, worlds: range) -> None:
    for world_size in worlds:
        for schedule, association in pairs(world_size):
            roots = {0, world_size - 1} if collective is Collective.REDUCE else {0}
            for root in roots:
                prove(schedule, collective, association, world_size, root)


@st.composite
def radices(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    inner = draw(st.lists(st.sampled_from([2, 4, 8]), max_size=4))
    last = draw(st.integers(2, 9))
    world_size = draw(st.integers(1, min(prod(inner) * last, 96)))
    return (*inner, last), world_size


@given(radices(), st.sampled_from(list(Collective)), st.data())
def test_sampled_radix_lists(case: tuple[tuple[int, ...], int], collective: Collective, data: st.DataObject) -> None:
    radix_list, world_size = case
    root = data.draw(st.integers(0, world_size - 1)) if collective is Collective.REDUCE else 0
    prove(Staged(radix_list), collective, TREE, world_size, root)


@given(st.integers(1, 24), st.sampled_from(list(Collective)), st.data())
def test_the_steps_of_one_rank_are_the_whole_schedule_restricted(
    world_size: int, collective: Collective, data: st.DataObject
) -> None:
    schedule, association = data.draw(st.sampled_from(pairs(world_size)))
    root = data.draw(st.integers(0, world_size - 1)) if collective is Collective.REDUCE else 0
    rank = data.draw(st.integers(0, world_size - 1))
    cell = data.draw(st.sampled_from(list(cells(schedule, collective, association, world_size, root))))
    whole = list(schedule.steps(collective, cell, root))
    mine = list(schedule.steps(collective, cell, root, rank))
    assert len(mine) == len(whole)
    for step, seen in zip(whole, mine, strict=True):
        assert seen.transfers == tuple(t for t in step.transfers if rank in (t.src, t.dst))
        assert seen.folds == tuple(fold for fold in step.folds if fold.rank == rank)


@pytest.mark.parametrize(
    ("schedule", "association"),
    [(direct(1024), TREE), (halving(1024), TREE), (hierarchical(1024, 8), TREE), (Ring(), RING)],
    ids=lambda value: getattr(value, "text", None) if not isinstance(value, Association) else value.name,
)
def test_cells_of_a_world_of_1024(schedule: Schedule, association: Association) -> None:
    """A sample of the owners; `detcomm plan --world 1024 --verify` proves all of them."""
    from detcomm.simulate import Digests, simulate

    domain = Digests()
    for owner in (0, 1, 511, 1023):
        cell = Cell(association, 1024, owner, owner if association is RING else 0)
        proof = simulate(schedule, Collective.ALL_REDUCE, cell, domain)
        assert set(proof.results.values()) == {association.digest(1024, cell.element_class)}
        assert proof.traffic == schedule.traffic(Collective.ALL_REDUCE, cell)
