# SPDX-License-Identifier: Apache-2.0
"""Which operation of a program runs on which stream, and which waits for which.

Exchanges run on the call's own stream, copies and folds on the side stream: a piece is folded while the next one
travels. Each operation waits for the latest one on the other stream that touches the same bytes, and for no more.

Decides no bits: operations on the same bytes stay in the plan's order. Knows spans of bytes, no plans and no CUDA.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from detcomm.call import Call
from detcomm.collectives import Collective
from detcomm.cuda.native import RECORD, WAIT, COp, CRegion, CSignal
from detcomm.plan import Region, Space

MAIN, SIDE = 0, 1
"""The call's stream, and the one for copies and folds."""

NUM_EVENTS = 32
"""Events that a program uses in turn, half of them on each stream. A later event of a stream also stands for all
earlier ones, so a place that has been taken again makes a wait longer, never too short."""


@dataclass(slots=True)
class Item:
    """One operation before it has its waits."""

    op: COp
    regions: list[CRegion]
    reads: list["Span"]
    writes: list["Span"]
    stream: int = MAIN
    signals: list[CSignal] = field(default_factory=list)
    waits_for: "Item | None" = None
    is_awaited: bool = False
    event: int = 0


class Span(NamedTuple):
    """Bytes by where they lie if the call is in place; so input and output can clash.

    Attributes:
        space: a ``Space``, or what else has an order to keep.
    """

    space: enum.Enum
    start: int
    stop: int

    def overlaps(self, other: "Span") -> bool:
        return self.space is other.space and self.start < other.stop and other.start < self.stop


def place(call: Call, rank: int, region: Region) -> Span:
    """Where a region lies if input and output are the same memory, element by element."""
    start = region.offset
    space = region.space
    if space is Space.OUTPUT and call.collective is Collective.REDUCE_SCATTER:
        start += call.shard_starts[rank] * call.dtype.itemsize
    if space is Space.INPUT and call.collective is Collective.ALL_GATHER:
        # What a rank brings to a gather is copied onto itself if in place, so it clashes with nothing.
        return Span(Space.INPUT, start, start + region.num_bytes)
    if space is Space.INPUT:
        space = Space.OUTPUT
    return Span(space, start, start + region.num_bytes)


def ordered(items: Sequence[Item]) -> list[COp]:
    """The operations, with the records and waits between them."""
    by_stream: tuple[list[Item], list[Item]] = ([], [])
    waited = [0, 0]  # how many of the other stream's items this one has waited for
    for item in items:
        others = by_stream[1 - item.stream]
        for index in range(len(others) - 1, waited[item.stream] - 1, -1):
            if _clash(item, others[index]):
                item.waits_for = others[index]
                others[index].is_awaited = True
                waited[item.stream] = index + 1
                break
        by_stream[item.stream].append(item)
    side = by_stream[SIDE]
    joins = bool(side) and waited[MAIN] < len(side)
    if joins:
        side[-1].is_awaited = True
    return _with_events(items, side[-1] if joins else None)


def _with_events(items: Sequence[Item], last_of_side: Item | None) -> list[COp]:
    half = NUM_EVENTS // 2
    next_event = [0, 0]

    def take(stream: int) -> int:
        next_event[stream] += 1
        return stream * half + next_event[stream] % half

    start = take(MAIN)
    ops = [COp(kind=RECORD, stream=MAIN, event=start), COp(kind=WAIT, stream=SIDE, event=start)]
    for item in items:
        if item.waits_for is not None:
            ops.append(COp(kind=WAIT, stream=item.stream, event=item.waits_for.event))
        item.op.stream = item.stream
        ops.append(item.op)
        if item.is_awaited:
            item.event = take(item.stream)
            ops.append(COp(kind=RECORD, stream=item.stream, event=item.event))
    if last_of_side is not None:
        ops.append(COp(kind=WAIT, stream=MAIN, event=last_of_side.event))
    return ops


def _clash(item: Item, earlier: Item) -> bool:
    """Whether the two must keep their order."""
    written = earlier.writes
    if any(mine.overlaps(theirs) for mine in (*item.reads, *item.writes) for theirs in written):
        return True
    return any(mine.overlaps(theirs) for mine in item.writes for theirs in earlier.reads)
