# SPDX-License-Identifier: Apache-2.0
"""Why a staged schedule of thousands of ranks does the promised additions, without running every cell of it.

Let the radices be r_1, ..., r_k with N their product, and s_l = r_1 ... r_l. In the cell of owner ``o`` an aligned
block of s_l ranks, starting at ``b``, is held by rank ``b + o mod s_l``: the last stage is held by ``o``, and the
holder of a family at ``b' + o mod s_(l+1)`` gives, by the generator's rule, ``b + (o mod s_(l+1)) mod s_l``. Hence

1.  stage l is, inside each family, the one-stage schedule ``staged(r_l)`` over the r_l holders, whose receiver is
    number ``(o mod s_(l+1)) div s_l``: r_l different cases, all of which are proved here;
2.  its operands are the values of aligned blocks of s_l = 2^j ranks, in order, and RFC 6962's tree over whole such
    blocks is the tree over the ranks: T(m 2^j) has the subtrees T(2^j), combined as T(m) combines leaves.

By induction over the stages each cell ends with the tree. So that the argument does not stand on paper alone, whole
cells are run too, for owners in which each digit takes its first, second and last value; with a ragged last block, of
which the argument does not speak, these are the evidence.
"""

from collections.abc import Callable
from dataclasses import dataclass

from detcomm.association import TREE
from detcomm.collectives import Collective
from detcomm.schedule import Cell
from detcomm.schedules import Staged
from detcomm.simulate import Digests, prove, prove_cell


@dataclass(frozen=True)
class StagedProof:
    """What was run.

    Attributes:
        stages: the radix of each stage; all of its cells are proved.
        owners: owners whose whole cell was run.
        complete: whether the argument covers every cell: the world is the product of the radices.
    """

    stages: tuple[int, ...]
    owners: tuple[int, ...]
    complete: bool


def prove_staged(
    schedule: Staged, world_size: int, advance: Callable[[int, int], None] = lambda done, total: None
) -> StagedProof:
    """Prove an all-reduce by ``schedule`` for the ``tree`` association.

    Args:
        advance: told how many of the whole cells have been run.

    Raises:
        ScheduleError: if an addition is not the promised one.
    """
    schedule.check(Collective.ALL_REDUCE, TREE, world_size)
    sizes = [1]
    stages: list[int] = []
    for radix in schedule.radices:
        if sizes[-1] >= world_size:
            break
        stages.append(min(radix, -(-world_size // sizes[-1])))
        sizes.append(sizes[-1] * radix)
    for radix in dict.fromkeys(stages):
        prove(Staged((radix,)), Collective.ALL_REDUCE, TREE, radix)
    owners = {0, world_size - 1}
    for size, radix in zip(sizes, stages, strict=False):
        owners |= {min(digit * size, world_size - 1) for digit in (1, radix - 1)}
    domain = Digests()
    for done, owner in enumerate(sorted(owners)):
        prove_cell(schedule, Collective.ALL_REDUCE, Cell(TREE, world_size, owner), domain)
        advance(done + 1, len(owners))
    full = 1
    for radix in stages:
        full *= radix
    return StagedProof(tuple(stages), tuple(sorted(owners)), full == world_size)
