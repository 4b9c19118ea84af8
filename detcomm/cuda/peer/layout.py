# SPDX-License-Identifier: Apache-2.0
"""Where a rank leaves what it sends to the ranks of its block. A pure function of its plan: peers compute it, too.

A rank's staging area holds its plan's scratch, if any of it is sent or used, and behind it slots into which regions of
input and output are copied before they are sent. Slots are used in turn, one for each step that sends.

Knows plans, neither addresses nor CUDA.
"""

from collections.abc import Container, Iterator
from typing import NamedTuple

from detcomm.cuda.native import MAX_PEER_OPERANDS
from detcomm.cuda.stream_order import Span, place
from detcomm.plan import Message, Plan, PlanStep, Region, Space

NUM_SLOTS = 3
"""A step may be staged while peers read the one before it, and the slowest of them the one before that."""

_ALIGN_BYTES = 512


class Sent(NamedTuple):
    """One message, as its receiver finds it.

    Attributes:
        region: in the sender's plan.
        staged: where it lies in the sender's staging area.
        may_stay: whether it may be read in the sender's input or output, if peers have mapped that memory.
    """

    region: Region
    staged: int
    may_stay: bool

    @property
    def is_copied(self) -> bool:
        """Whether it lies elsewhere before; what is in scratch is in the staging area already."""
        return self.region.space is not Space.SCRATCH


class Layout:
    """The messages of one rank to the ranks of its block.

    Args:
        plan: of the sender.
        mates: the ranks of its block, itself left out.

    Attributes:
        num_bytes: that the staging area must have.
        slot_of: for each step that stages, its slot's number in order, not taken modulo the number of slots.
    """

    def __init__(self, plan: Plan, mates: Container[int]) -> None:
        self.slot_of: dict[int, int] = {}
        self._sent: dict[tuple[int, int], tuple[Sent, ...]] = {}
        offsets = [_staged_offsets(step, mates) for step in plan.steps]
        sizes = [size for _, size in offsets]
        scratch_bytes = _aligned(plan.scratch_bytes) if _uses_scratch(plan, mates) else 0
        slot_bytes = max(sizes, default=0)
        num_slots = min(sum(size > 0 for size in sizes), NUM_SLOTS)
        self.num_bytes = scratch_bytes + num_slots * slot_bytes
        for index, (step, (staged, size)) in enumerate(zip(plan.steps, offsets, strict=True)):
            start = scratch_bytes
            if size:
                self.slot_of[index] = len(self.slot_of)
                start += self.slot_of[index] % NUM_SLOTS * slot_bytes
            spans = written(plan, step)
            for message in _to(step, mates):
                region = message.region
                offset = region.offset if region.space is Space.SCRATCH else start + staged[region]
                may_stay = region.space is not Space.SCRATCH and not _overlaps(plan, region, spans)
                key = index, message.peer
                self._sent[key] = (*self._sent.get(key, ()), Sent(region, offset, may_stay))

    def to(self, step: int, peer: int) -> tuple[Sent, ...]:
        """What goes to a peer in a step, in the order in which it is received."""
        return self._sent.get((step, peer), ())

    def receivers(self, step: int) -> list[int]:
        """The ranks of the block that get something in a step, ascending."""
        return sorted(peer for index, peer in self._sent if index == step)


def _to(step: PlanStep, mates: Container[int]) -> Iterator[Message]:
    return (message for message in step.sends if message.peer in mates and message.region.num_bytes)


def _staged_offsets(step: PlanStep, mates: Container[int]) -> tuple[dict[Region, int], int]:
    """Where in its slot each region is staged, once for all its receivers; and the bytes of the slot."""
    offsets: dict[Region, int] = {}
    size = 0
    for message in _to(step, mates):
        region = message.region
        if region.space is not Space.SCRATCH and region not in offsets:
            offsets[region] = size
            size += _aligned(region.num_bytes)
    return offsets, size


def _uses_scratch(plan: Plan, mates: Container[int]) -> bool:
    """Whether anything lies in scratch but what is received from mates and read from them in the same step."""
    for index, step in enumerate(plan.steps):
        touched = [copy.dst for copy in step.packs] + [copy.src for copy in step.packs]
        touched += [copy.dst for copy in step.unpacks] + [fold.output for fold in step.folds]
        touched += [message.region for message in step.sends]
        touched += [message.region for message in step.recvs if message.peer not in mates]
        if any(region.space is Space.SCRATCH and region.num_bytes for region in touched):
            return True
        arrived = [message.region for message in step.recvs if message.peer in mates]
        if any(not is_borrowed(plan, index, region) for region in arrived if region.space is Space.SCRATCH):
            return True
        read = [copy.src for copy in step.unpacks] + [region for fold in step.folds for region in fold.inputs]
        for region in read:
            if region.space is Space.SCRATCH and not any(contains(there, region) for there in arrived):
                return True
    return False


def is_borrowed(plan: Plan, step: int, region: Region) -> bool:
    """Whether what is received there in a step is read in that step alone, by folds and copies that can reach further.

    Then they read it at the peer, and it is never received.
    """
    if region.space is not Space.SCRATCH:
        return False
    now = plan.steps[step]
    long_folds = [fold for fold in now.folds if len(fold.inputs) > MAX_PEER_OPERANDS]  # they have no room for places
    if any(part.overlaps(region) for fold in long_folds for part in fold.inputs):
        return False
    read_now = [copy.src for copy in now.unpacks] + [part for fold in now.folds for part in fold.inputs]
    if any(part.overlaps(region) and not contains(region, part) for part in read_now):
        return False
    if any(copy.dst.overlaps(region) for copy in now.unpacks) or any(
        fold.output.overlaps(region) for fold in now.folds
    ):
        return False
    for later in plan.steps[step + 1 :]:
        parts = [copy.src for copy in later.packs] + [message.region for message in later.sends]
        if any(part.overlaps(region) for part in parts):
            return False
        written = [copy.dst for copy in later.packs] + [message.region for message in later.recvs]
        if any(contains(part, region) for part in written):
            return True
        parts = [copy.src for copy in later.unpacks] + [part for fold in later.folds for part in fold.inputs]
        if any(part.overlaps(region) for part in parts):
            return False
    return True


def contains(outer: Region, inner: Region) -> bool:
    """Whether all bytes of one lie in the other."""
    return (
        outer.space is inner.space
        and outer.offset <= inner.offset
        and inner.offset + inner.num_bytes <= outer.offset + outer.num_bytes
    )


def written(plan: Plan, step: PlanStep) -> list[Span]:
    """What a step of this rank writes behind its exchange: while peers read what it sends."""
    regions = [copy.dst for copy in step.unpacks] + [fold.output for fold in step.folds]
    regions += [message.region for message in step.recvs]
    return [place(plan.call, plan.rank, region) for region in regions if region.num_bytes]


def _overlaps(plan: Plan, region: Region, spans: list[Span]) -> bool:
    own = place(plan.call, plan.rank, region)
    return any(own.overlaps(other) for other in spans)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
