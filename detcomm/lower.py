# SPDX-License-Identifier: Apache-2.0
"""Lower a schedule to one rank: values become byte ranges, pieces become a pipeline.

Piece ``c`` of every cell does schedule step ``s`` in plan step ``lag * s + c``. With ``lag`` 1 the exchange of one
piece carries the next step's messages of the piece before it; with ``lag`` 2 the fold of a piece may run while the next
exchange is under way. A piece's scratch lives for ``lag * (steps - 1) + 1`` plan steps, and with ``lag`` 2 until the
fold of its last step has run beside the next exchange; so few slots are enough, however long the message.

Between a pair of ranks, both enumerate messages in the same order: plan step, piece, cell. Several values for one peer
in one step of a piece travel as one message, packed on the way out.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import groupby

from detcomm.association import Association
from detcomm.call import Call
from detcomm.collectives import Accumulate, Collective, ReduceOp, partial_dtype
from detcomm.partition import Share, partition
from detcomm.plan import Copy, Fold, Message, PlanStep, Region, Space
from detcomm.schedule import Schedule, Step, Transfer, Value

_ALIGN_BYTES = 64
"""Scratch is handed out by cache lines, which suits every vector width and the GPU's 16-byte accesses."""


@dataclass
class _OpenStep:
    """A plan step being filled by the pieces that are active in it."""

    packs: list[Copy] = field(default_factory=list)
    sends: list[Message] = field(default_factory=list)
    recvs: list[Message] = field(default_factory=list)
    unpacks: list[Copy] = field(default_factory=list)
    folds: list[Fold] = field(default_factory=list)

    def close(self) -> PlanStep:
        return PlanStep(tuple(self.packs), tuple(self.sends), tuple(self.recvs), tuple(self.unpacks), tuple(self.folds))


@dataclass(frozen=True)
class Lowering:
    """What the lowering of a call needs to know; the same on all ranks but for ``rank``."""

    schedule: Schedule
    call: Call
    association: Association
    accumulate: Accumulate
    rank: int
    world_size: int
    piece_elems: int
    lag: int = 1

    def steps(self) -> tuple[tuple[PlanStep, ...], int]:
        """The plan's steps and the bytes of scratch that they need."""
        call = self.call
        shares = partition(call, self.association, self.schedule, self.world_size)
        num_steps = self.schedule.num_steps(call.collective, self.world_size)
        longest = max((share.count for share in shares), default=0)
        num_pieces = -(-longest // self.piece_elems)
        num_slots = min(num_pieces, max(self.lag * (num_steps - 1) + 1, self.lag)) if num_steps else 1
        plan: defaultdict[int, _OpenStep] = defaultdict(_OpenStep)
        # Pieces only get shorter, so the first one needs the most scratch: it measures the slot for all.
        slot_bytes = _Piece(self, shares, 0, 0).emit(defaultdict(_OpenStep)) if num_pieces else 0
        for index in range(num_pieces):
            used = _Piece(self, shares, index, index % num_slots * slot_bytes).emit(plan)
            assert used <= slot_bytes, "a later piece needs more scratch than the first"
        last = max(plan, default=-1)
        return tuple(plan[index].close() for index in range(last + 1)), num_slots * slot_bytes


class _Piece:
    """One piece of every share, from its first step to its last."""

    def __init__(self, lowering: Lowering, shares: tuple[Share, ...], index: int, scratch_base: int) -> None:
        self._lowering = lowering
        self._index = index
        self._base = scratch_base
        self._used = 0
        self._shares = [(share, segments) for share in shares if (segments := share.piece(index, lowering.piece_elems))]
        self._contiguous = {share.cell: share.is_contiguous(lowering.piece_elems) for share, _ in self._shares}
        call = lowering.call
        self._leaf_bytes = call.dtype.itemsize
        self._partial_bytes = partial_dtype(call.op or ReduceOp.MAX, call.dtype, lowering.accumulate).itemsize
        self._starts = call.shard_starts if call.shard_counts is not None else ()
        # Where this rank has each value of each share: (share's number, value) -> region.
        self._held: dict[tuple[int, Value], Region] = {}

    def emit(self, plan: defaultdict[int, _OpenStep]) -> int:
        """Add this piece's actions to the plan; return the bytes of scratch that it used."""
        lowering, call = self._lowering, self._lowering.call
        for number in range(len(self._shares)):
            self._place_own(number, plan[self._index])
        rows = [
            list(lowering.schedule.steps(call.collective, share.cell, call.root, lowering.rank))
            for share, _ in self._shares
        ]
        num_steps = lowering.schedule.num_steps(call.collective, lowering.world_size)
        for step in range(num_steps):
            at = lowering.lag * step + self._index
            self._exchange(plan[at], [row[step] for row in rows])
            for number, row in enumerate(rows):
                for fold in row[step].folds:
                    self._fold(plan[at], plan, at, number, fold.inputs, fold.output)
        return self._used

    # -- where things lie ---------------------------------------------------------------------------------------

    def _count(self, number: int) -> int:
        return sum(stop - start for start, stop in self._shares[number][1])

    def _value_bytes(self, number: int, value: Value) -> int:
        leaf = value[1] - value[0] == 1 or value == self._shares[number][0].cell.whole
        return self._count(number) * (self._leaf_bytes if leaf else self._partial_bytes)

    def _scratch(self, num_bytes: int) -> Region:
        region = Region(Space.SCRATCH, self._base + self._used, num_bytes)
        self._used += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return region

    def _regions(self, space: Space, number: int) -> list[Region]:
        """The piece's segments in the caller's input or output."""
        share, segments = self._shares[number]
        call = self._lowering.call
        sharded = (space is Space.INPUT and call.collective is Collective.ALL_GATHER) or (
            space is Space.OUTPUT and call.collective is Collective.REDUCE_SCATTER
        )
        origin = self._starts[share.cell.owner] if sharded else 0
        return [
            Region(space, (start - origin) * self._leaf_bytes, (stop - start) * self._leaf_bytes)
            for start, stop in segments
        ]

    def _keeps_result(self, number: int) -> bool:
        call, rank = self._lowering.call, self._lowering.rank
        if call.collective is Collective.REDUCE_SCATTER:
            return self._shares[number][0].cell.owner == rank
        return call.collective is not Collective.REDUCE or call.root == rank

    def _place_own(self, number: int, step: _OpenStep) -> None:
        """What this rank brings: its leaf, or the shard that it gathers, in one run of bytes."""
        share, _ = self._shares[number]
        cell, rank = share.cell, self._lowering.rank
        gathers = self._lowering.call.collective is Collective.ALL_GATHER
        if gathers and cell.owner != rank:
            return
        regions = self._regions(Space.INPUT, number)
        if gathers or (cell.world_size == 1 and self._keeps_result(number)):
            outputs = self._regions(Space.OUTPUT, number)
            step.packs += [Copy(src, dst) for src, dst in zip(regions, outputs, strict=True)]
        if self._contiguous[cell]:
            held = regions[0]
        else:
            held = self._scratch(sum(region.num_bytes for region in regions))
            step.packs += _gather(regions, held)
        self._held[number, cell.whole if gathers else cell.leaf(rank)] = held

    def _result_region(self, number: int) -> tuple[Region, bool]:
        """Where a result goes, and whether it must be spread over the output's segments from there."""
        if self._keeps_result(number) and self._contiguous[self._shares[number][0].cell]:
            return self._regions(Space.OUTPUT, number)[0], False
        return self._scratch(self._count(number) * self._leaf_bytes), self._keeps_result(number)

    # -- what a step does ---------------------------------------------------------------------------------------

    def _exchange(self, step: _OpenStep, rows: list[Step]) -> None:
        rank = self._lowering.rank
        items = [(number, transfer) for number, row in enumerate(rows) for transfer in row.transfers]
        sends = [(number, transfer) for number, transfer in items if transfer.src == rank]
        recvs = [(number, transfer) for number, transfer in items if transfer.dst == rank]
        by_dst = sorted(sends, key=lambda item: item[1].dst)
        by_src = sorted(recvs, key=lambda item: item[1].src)
        for peer, group in groupby(by_dst, key=lambda item: item[1].dst):
            step.sends.append(Message(peer, self._outgoing(step, list(group))))
        for peer, group in groupby(by_src, key=lambda item: item[1].src):
            step.recvs.append(Message(peer, self._incoming(step, list(group))))

    def _outgoing(self, step: _OpenStep, group: list[tuple[int, Transfer]]) -> Region:
        regions = [self._held[number, transfer.value] for number, transfer in group]
        if len(regions) == 1:
            return regions[0]
        packed = self._scratch(sum(region.num_bytes for region in regions))
        step.packs += _gather(regions, packed)
        return packed

    def _incoming(self, step: _OpenStep, group: list[tuple[int, Transfer]]) -> Region:
        if len(group) == 1:
            number, (_, _, value) = group[0]
            if value != self._shares[number][0].cell.whole:
                region = self._scratch(self._value_bytes(number, value))
            else:
                region, spread = self._result_region(number)
                if spread:
                    step.unpacks += _scatter(region, self._regions(Space.OUTPUT, number))
            self._held[number, value] = region
            return region
        sizes = [self._value_bytes(number, transfer.value) for number, transfer in group]
        packed = self._scratch(sum(sizes))
        offset = packed.offset
        for (number, (_, _, value)), size in zip(group, sizes, strict=True):
            region = Region(Space.SCRATCH, offset, size)
            offset += size
            self._held[number, value] = region
            if value == self._shares[number][0].cell.whole and self._keeps_result(number):
                step.unpacks += _scatter(region, self._regions(Space.OUTPUT, number))
        return packed

    def _fold(
        self,
        step: _OpenStep,
        plan: defaultdict[int, _OpenStep],
        at: int,
        number: int,
        inputs: tuple[Value, ...],
        output: Value,
    ) -> None:
        cell = self._shares[number][0].cell
        final = output == cell.whole
        if final:
            region, spread = self._result_region(number)
            if spread:  # a fold is the last part of a step: its result is spread at the start of the next one
                plan[at + 1].packs += _scatter(region, self._regions(Space.OUTPUT, number))
        else:
            region = self._scratch(self._value_bytes(number, output))
        self._held[number, output] = region
        step.folds.append(
            Fold(
                inputs=tuple(self._held[number, value] for value in inputs),  # bits: operands in leaf order
                leaves=tuple(value[1] - value[0] == 1 for value in inputs),
                output=region,
                count=self._count(number),
                shape=cell.association.shape,
                final=final,  # bits: the one rounding, at the root
            )
        )


def _gather(regions: list[Region], packed: Region) -> list[Copy]:
    return [Copy(region, part) for region, part in zip(regions, _parts(packed, regions), strict=True)]


def _scatter(packed: Region, regions: list[Region]) -> list[Copy]:
    return [Copy(part, region) for region, part in zip(regions, _parts(packed, regions), strict=True)]


def _parts(packed: Region, like: list[Region]) -> list[Region]:
    parts, offset = [], packed.offset
    for region in like:
        parts.append(Region(packed.space, offset, region.num_bytes))
        offset += region.num_bytes
    return parts
