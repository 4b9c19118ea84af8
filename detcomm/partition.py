# SPDX-License-Identifier: Apache-2.0
"""Which elements make up each cell of a call, and how cells are cut into pieces for pipelining.

A piece is a run of a cell's own elements; piece ``k`` of all cells advances together. Neither can change a bit: the
class of an element depends on its index alone, and an owner only says where the additions are done.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from detcomm.association import Association
from detcomm.call import Call
from detcomm.schedule import Cell, Schedule

Segment = tuple[int, int]
"""A run of elements of the whole message: [start, stop)."""

_ALIGN_BYTES = 64
"""Shares of an all-reduce begin on a cache line where the message is long enough."""


@dataclass(frozen=True)
class Share:
    """A cell and its elements, as segments of the whole message in ascending order."""

    cell: Cell
    segments: tuple[Segment, ...]

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.segments)

    def piece(self, index: int, piece_elems: int) -> tuple[Segment, ...]:
        """The segments of one piece: elements ``[index * piece_elems, ...)`` of this share."""
        skip, left = index * piece_elems, piece_elems
        found = []
        for start, stop in self.segments:
            length = stop - start
            if skip >= length:
                skip -= length
                continue
            taken = min(length - skip, left)
            found.append((start + skip, start + skip + taken))
            skip, left = 0, left - taken
            if not left:
                break
        return tuple(found)

    def is_contiguous(self, piece_elems: int) -> bool:
        """Whether every piece is one segment."""
        if len(self.segments) <= 1:
            return True
        return all((stop - start) % piece_elems == 0 for start, stop in self.segments[:-1])


def partition(call: Call, association: Association, schedule: Schedule, world_size: int) -> tuple[Share, ...]:
    """Deal the elements of a call to cells. Shares without elements are left out; all ranks find the same."""
    if call.shard_counts is not None:
        shares = _shards(call, association, world_size)
    else:
        owners = schedule.owners(call.collective, world_size, call.root)
        if association.name == "ring":
            shares = _ring_classes(call.count, association, owners, world_size)
        else:
            shares = _even(call, association, owners, world_size)
    return tuple(share for share in shares if share.count)


def _shards(call: Call, association: Association, world_size: int) -> Iterator[Share]:
    assert call.shard_counts is not None
    for rank, (start, count) in enumerate(zip(call.shard_starts, call.shard_counts, strict=True)):
        element_class = rank if association.name == "ring" and call.collective.reduces else 0
        # bits: in reduce-scatter the receiving rank is the owner
        yield Share(Cell(association, world_size, rank, element_class), ((start, start + count),))


def _ring_classes(count: int, association: Association, owners: Sequence[int], world_size: int) -> Iterator[Share]:
    chunk = association.ring_chunk_elems
    several = len(owners) == world_size
    for element_class in range(world_size):
        segments = tuple(
            (start, min(start + chunk, count)) for start in range(element_class * chunk, count, chunk * world_size)
        )  # bits: the owner of element i is (i // chunk) mod N
        owner = element_class if several else owners[0]
        yield Share(Cell(association, world_size, owner, element_class), segments)


def _even(call: Call, association: Association, owners: Sequence[int], world_size: int) -> Iterator[Share]:
    align = max(_ALIGN_BYTES // call.dtype.itemsize, 1)
    if call.count < align * len(owners):
        align = 1
    blocks = -(-call.count // align)
    sizes = [blocks // len(owners) + (index < blocks % len(owners)) for index in range(len(owners))]
    stops = [min(stop * align, call.count) for stop in accumulate(sizes)]
    start = 0
    for owner, stop in zip(owners, stops, strict=True):
        yield Share(Cell(association, world_size, owner), ((start, stop),))
        start = stop
