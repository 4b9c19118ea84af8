# SPDX-License-Identifier: Apache-2.0
"""One generator for direct, halving-and-doubling and hierarchical schedules: exchange inside blocks, fold, go up.

    staged(2,2,2), N = 8, the cell owned by rank 5: who holds which block after each stage

    stage 2                    5                 blocks of 8     the result
                        ______/ \\______
    stage 1            1               5         blocks of 4     1 sends (0..3) to 5
                     /   \\           /   \\
    stage 0         1     3         5     7      blocks of 2     3 -> 1, 7 -> 5
                   / \\   / \\       / \\   / \\
                  0   1 2   3     4   5 6   7    leaves          0 -> 1, 2 -> 3, 4 -> 5, 6 -> 7

The blocks of a stage are aligned runs of 2^k ranks, so they are subtrees of ``tree`` for any N, a ragged last block
included. Distance 1 comes first: the textbook order, N/2 first, builds another tree. The gather half walks down the
same edges.

Steps: as many as stages, each half.  Sent, over all ranks: N-1 values of the cell, each half.
Sources: Rabenseifner 2004 (recursive halving and doubling); Thakur, Rabenseifner, Gropp 2005.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod

from detcomm.association import Association
from detcomm.collectives import Collective
from detcomm.errors import ScheduleError
from detcomm.schedule import Cell, Fold, Schedule, Step, Traffic, Transfer, Value, refuse


@dataclass(frozen=True)
class Staged(Schedule):
    """Exchange inside blocks of ``radices[0]`` neighbours, then of ``radices[1]`` such blocks, and so on.

    Args:
        radices: block sizes of the stages, each a power of two but the last. Their product reaches the world size.
    """

    radices: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.radices or any(radix < 2 for radix in self.radices):
            raise ScheduleError(f"staged: radices must be at least 2, got {self.radices}")
        for radix in self.radices[:-1]:
            if radix & (radix - 1):
                raise ScheduleError(
                    f"staged: every radix but the last must be a power of two, got {radix} in {self.radices}"
                )

    @property
    def text(self) -> str:
        return f"staged({','.join(map(str, self.radices))})"

    def check(self, collective: Collective, association: Association, world_size: int) -> None:
        if prod(self.radices) < world_size:
            raise ScheduleError(f"{self.text} reaches {prod(self.radices)} ranks, the group has {world_size}")
        if collective.reduces and association.name != "tree" and self._num_stages(world_size) > 1:
            raise refuse(self, association, "its first stage would add blocks that are no subtrees; one stage would do")

    def num_halves_steps(self, world_size: int) -> tuple[int, int]:
        stages = self._num_stages(world_size)
        return stages, stages

    def reduce_half(self, cell: Cell, rank: int | None = None) -> Iterator[Step]:
        for stage in range(self._num_stages(cell.world_size)):
            transfers: list[Transfer] = []
            folds: list[Fold] = []
            for receiver, children in self._families(cell, stage, rank):
                transfers += [
                    Transfer(holder, receiver, value)
                    for holder, value in children
                    if holder != receiver and rank in (None, holder, receiver)
                ]
                if len(children) > 1 and rank in (None, receiver):
                    folds.append(Fold(receiver, self._leaf_ordered(cell, children)))
            yield Step(tuple(transfers), tuple(folds))

    def gather_half(self, cell: Cell, rank: int | None = None) -> Iterator[Step]:
        for stage in reversed(range(self._num_stages(cell.world_size))):
            yield Step(
                tuple(
                    Transfer(sender, holder, cell.whole)
                    for sender, children in self._families(cell, stage, rank)
                    for holder, _ in children
                    if holder != sender and rank in (None, holder, sender)
                )
            )

    def half_traffic(self, cell: Cell) -> tuple[Traffic, Traffic]:
        world_size = cell.world_size
        leaves = partials = 0
        sizes = _block_sizes(self.radices, world_size)
        last = world_size - 1
        for level, (below, above) in enumerate(pairwise(sizes)):
            sent = -(-world_size // below) - -(-world_size // above)
            if level == 0:
                leaves += sent
                continue
            # A ragged last block of one rank travels as a leaf, unless its family's holder is that very rank.
            alone = last % below == 0 and last % above != 0
            lone = int(alone and _holder(sizes, world_size, cell.owner, level + 1, last) != last)
            leaves += lone
            partials += sent - lone
        return Traffic(leaves=leaves, partials=partials), Traffic(results=world_size - 1)

    def _num_stages(self, world_size: int) -> int:
        return len(_block_sizes(self.radices, world_size)) - 1

    def _families(self, cell: Cell, stage: int, rank: int | None) -> Iterator[tuple[int, list[tuple[int, Value]]]]:
        """Each block of ``stage + 1`` with its holder and, for its child blocks, holder and value.

        For one rank: its own family, and only the children that it needs.
        """
        sizes, world_size = _block_sizes(self.radices, cell.world_size), cell.world_size
        size, above = sizes[stage], sizes[stage + 1]
        if rank is None:
            starts: range | tuple[int] = range(0, world_size, above)
            receivers = _all_holders(sizes, world_size, cell.owner)[stage + 1]
        else:
            starts = (rank // above * above,)
            receivers = (_holder(sizes, world_size, cell.owner, stage + 1, rank),)
        for start, receiver in zip(starts, receivers, strict=True):
            stop = min(start + above, world_size)
            blocks = range(start, stop, size)
            if rank is not None and rank != receiver:
                blocks = range(rank // size * size, stop, size)[:1]
            children = []
            for block in blocks:
                block_stop = min(block + size, stop)
                value = cell.leaf(block) if size == 1 else (block, block_stop)
                children.append((_keeper(block, block_stop, start, receiver), value))
            yield receiver, children

    def _leaf_ordered(self, cell: Cell, children: list[tuple[int, Value]]) -> tuple[Value, ...]:
        return tuple(sorted(value for _, value in children))  # bits: operands in leaf order


@lru_cache(maxsize=256)
def _block_sizes(radices: tuple[int, ...], world_size: int) -> tuple[int, ...]:
    """Ranks of one block before each stage, and of the whole. Stages beyond the whole world have nothing to do."""
    sizes = [1]
    for radix in radices:
        if sizes[-1] >= world_size:
            break
        sizes.append(sizes[-1] * radix)
    return tuple(sizes)


def _keeper(block: int, block_stop: int, start: int, receiver: int) -> int:
    """Who holds a child block's value, given the holder of its family, which begins at ``start``.

    The child block that contains its family's holder is held by that rank, any other by the rank at the same distance
    from its start: so a family sends one value less than it has children, and the ranks share the work evenly.
    """
    if block <= receiver < block_stop:
        return receiver
    return block + (receiver - start) % (block_stop - block)


def _holder(sizes: tuple[int, ...], world_size: int, owner: int, level: int, rank: int) -> int:
    """The rank that holds the block of ``level`` that contains ``rank``: down from the owner, who holds the whole."""
    holder, start, stop = owner, 0, world_size
    for size in sizes[-2 : -len(sizes) + level - 1 : -1]:
        block = rank // size * size
        block_stop = min(block + size, stop)
        holder = _keeper(block, block_stop, start, holder)
        start, stop = block, block_stop
    return holder


@lru_cache(maxsize=4)
def _all_holders(sizes: tuple[int, ...], world_size: int, owner: int) -> tuple[tuple[int, ...], ...]:
    """For each level the holders of all its blocks, so that both halves of a cell find them once."""
    levels: list[tuple[int, ...]] = [(owner,)]
    for size, above in zip(sizes[-2::-1], sizes[:0:-1], strict=True):
        parents = levels[-1]
        levels.append(
            tuple(
                _keeper(block, min(block + size, world_size), block // above * above, parents[block // above])
                for block in range(0, world_size, size)
            )
        )
    return tuple(reversed(levels))


def direct(world_size: int) -> Staged:
    """One stage: all-to-all of shards, one local fold, all-gather. Moves leaves alone, so it is right for any tree."""
    return Staged((max(world_size, 2),))


def halving(world_size: int) -> Staged:
    """Radix 2 throughout, distance 1 first."""
    return Staged((2,) * max((world_size - 1).bit_length(), 1))


FAMILY_BLOCKS = 64
"""Most blocks that exchange in one stage: a rank posts that many messages at once."""


def hierarchical(world_size: int, block_size: int) -> Staged:
    """Inside aligned blocks of ``block_size`` ranks, then across them, in further stages where there are many.

    Direct where that leaves one stage.
    """
    if block_size < 2 or block_size >= world_size:
        return direct(world_size)
    radices, num_blocks = [block_size], -(-world_size // block_size)
    while num_blocks > FAMILY_BLOCKS:
        radices.append(FAMILY_BLOCKS // 2)
        num_blocks = -(-num_blocks // radices[-1])
    return Staged((*radices, num_blocks))
