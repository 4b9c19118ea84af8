# SPDX-License-Identifier: Apache-2.0
"""Literal small schedules, what each family refuses, and a simulator that does catch broken ones."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from detcomm.association import LINEAR, TREE, Association
from detcomm.collectives import Collective
from detcomm.errors import ScheduleError, UsageError
from detcomm.schedule import Cell, Fold, Schedule, Step, Transfer
from detcomm.schedules import Binomial, Oneshot, Ring, Staged, direct, halving, hierarchical, parse
from detcomm.simulate import Arrays, Digests, Text, prove, prove_cell, simulate

RING = Association("ring")


def test_ring_reduce_scatter_adds_its_own_part_on_the_right() -> None:
    steps = list(Ring().reduce_half(Cell(RING, 3, owner=1, element_class=1)))
    assert steps == [
        Step((Transfer(2, 0, (0, 1)),), (Fold(0, ((0, 1), (1, 2))),)),
        Step((Transfer(0, 1, (0, 2)),), (Fold(1, ((0, 2), (2, 3))),)),
    ]
    proof = simulate(Ring(), Collective.REDUCE_SCATTER, Cell(RING, 3, 1, 1), Text())
    assert proof.results == {1: "((2+0)+1)"}


def test_halving_goes_to_the_neighbour_first() -> None:
    steps = list(halving(4).reduce_half(Cell(TREE, 4, owner=3)))
    assert steps == [
        Step((Transfer(0, 1, (0, 1)), Transfer(2, 3, (2, 3))), (Fold(1, ((0, 1), (1, 2))), Fold(3, ((2, 3), (3, 4))))),
        Step((Transfer(1, 3, (0, 2)),), (Fold(3, ((0, 2), (2, 4))),)),
    ]


def test_direct_is_one_exchange_and_one_fold_of_all() -> None:
    (step,) = direct(3).reduce_half(Cell(TREE, 3, owner=2))
    assert step == Step((Transfer(0, 2, (0, 1)), Transfer(1, 2, (1, 2))), (Fold(2, ((0, 1), (1, 2), (2, 3))),))


def test_a_ragged_block_promotes_its_value() -> None:
    proof = simulate(halving(5), Collective.ALL_REDUCE, Cell(TREE, 5, owner=0), Text())
    assert proof.results == dict.fromkeys(range(5), "(((0+1)+(2+3))+4)")
    # Rank 4 is alone in its blocks until the last stage: it sends a leaf then.
    assert list(halving(5).reduce_half(Cell(TREE, 5, 0)))[2].transfers == (Transfer(4, 0, (4, 5)),)


def test_binomial_forwards_the_result_and_never_rotates() -> None:
    proof = simulate(Binomial(), Collective.REDUCE, Cell(TREE, 6, owner=0), Text(), root=4)
    assert proof.results == {4: TREE.text(6)}


@pytest.mark.parametrize("text", ["oneshot", "direct", "halving", "hierarchical", "staged(4,3)", "binomial"])
def test_every_family_builds_the_tree_in_numbers(text: str) -> None:
    """The bits of the arrays domain equal the tree's by hand, and another tree's differ."""
    world_size = 7
    big = np.float32(1e8)
    inputs = [np.array([big * (-1) ** rank, 1e-3 * rank + 1], np.float32) for rank in range(world_size)]
    a, b, c, d, e, f, g = inputs
    expected = ((a + b) + (c + d)) + ((e + f) + g)
    other = (((((a + b) + c) + d) + e) + f) + g
    assert expected.tobytes() != other.tobytes()
    schedule = parse(text, world_size, 4)
    proof = simulate(schedule, Collective.ALL_REDUCE, Cell(TREE, world_size, owner=0), Arrays(inputs))
    assert {result.tobytes() for result in proof.results.values()} == {expected.tobytes()}


@pytest.mark.parametrize(
    ("schedule", "association", "world_size"),
    [
        (halving(8), LINEAR, 8),
        (hierarchical(8, 4), RING, 8),
        (Ring(), TREE, 3),
        (Ring(), LINEAR, 4),
        (Binomial(), LINEAR, 4),
        (Binomial(), RING, 4),
        (Binomial(), RING, 2),
        (Staged((2, 2)), TREE, 5),
    ],
)
def test_what_does_not_build_the_promised_tree_is_refused(
    schedule: Schedule, association: Association, world_size: int
) -> None:
    with pytest.raises(ScheduleError):
        schedule.check(Collective.ALL_REDUCE, association, world_size)


@pytest.mark.parametrize("radices", [(), (1, 2), (3, 2), (2, 6, 2)])
def test_radices_that_break_subtrees_are_refused(radices: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError):
        Staged(radices)


def test_parse_knows_every_name_and_refuses_others() -> None:
    assert parse("staged(2, 3)", 6) == Staged((2, 3))
    assert parse("hierarchical", 12, 4) == Staged((4, 3))
    assert parse("hierarchical", 8192, 8) == Staged((8, 32, 32))
    assert parse("halving", 5) == Staged((2, 2, 2))
    assert [parse(name, 4).text for name in ("oneshot", "binomial", "ring", "direct")] == [
        "oneshot",
        "binomial",
        "ring",
        "staged(4)",
    ]
    with pytest.raises(UsageError, match="butterfly"):
        parse("butterfly", 4)


@dataclass(frozen=True)
class _Broken(Oneshot):
    """A direct schedule for three ranks with one thing wrong."""

    fault: str = field(default="")

    def reduce_half(self, cell: Cell, rank: int | None = None) -> Iterator[Step]:
        transfers = [Transfer(0, cell.owner, (0, 1)), Transfer(1, cell.owner, (1, 2))]
        folds = [Fold(cell.owner, ((0, 1), (1, 2), (2, 3)))]
        match self.fault:
            case "not held":
                transfers[1] = Transfer(0, cell.owner, (1, 2))
            case "twice":
                transfers.append(Transfer(0, cell.owner, (0, 1)))
            case "missing":
                del transfers[1]
            case "order":
                folds = [Fold(cell.owner, ((1, 2), (2, 3))), Fold(cell.owner, ((0, 1), (1, 3)))]
            case "gap":
                folds = [Fold(cell.owner, ((0, 1), (2, 3)))]
            case "itself":
                transfers.append(Transfer(cell.owner, cell.owner, (2, 3)))
        if self.fault == "order":
            yield Step(tuple(transfers), tuple(folds[:1]))
            yield Step((), tuple(folds[1:]))
        else:
            yield Step(tuple(transfers), tuple(folds))

    def num_steps(self, collective: Collective, world_size: int) -> int:
        return 2 if self.fault == "order" else 1


@pytest.mark.parametrize("fault", ["not held", "twice", "missing", "order", "gap", "itself"])
def test_the_simulator_catches_a_broken_schedule(fault: str) -> None:
    cell = Cell(TREE, 3, owner=2)
    prove_cell(_Broken(), Collective.REDUCE_SCATTER, cell, Digests())
    with pytest.raises(ScheduleError):
        prove_cell(_Broken(fault), Collective.REDUCE_SCATTER, cell, Digests())


def test_prove_rejects_a_right_looking_schedule_of_another_tree() -> None:
    """Linear promised, tree built: only the comparison of digests can see it."""

    class Unchecked(Staged):
        def check(self, collective: Collective, association: Association, world_size: int) -> None:
            pass

    prove(Unchecked((4,)), Collective.REDUCE_SCATTER, LINEAR, 4)
    with pytest.raises(ScheduleError, match="another tree"):
        prove(Unchecked((2, 2)), Collective.REDUCE_SCATTER, LINEAR, 4)
