# SPDX-License-Identifier: Apache-2.0
"""Plans that leave a gather to NCCL: where every rank gives the same bytes to all, one ncclAllGather moves them.

NCCL chooses a ring or a tree for it, with few connections and one launch, where a plan's own messages make 2 (N - 1)
operations. It adds nothing up: folds, their operands and their order are those of the plan that is rewritten.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest

from detcomm.call import Call
from detcomm.collectives import Collective
from detcomm.plan import Copy, Fold, Message, Plan, PlanStep, Region, Space

SHARD_ALIGN_BYTES = 64
"""Shards begin on a cache line, as ``partition`` deals them."""

_NUM_SLOTS = 2
"""The fold of one piece reads its scratch while the next piece arrives."""


def has_even_shards(call: Call) -> bool:
    """Whether all ranks give equally much to an all-gather."""
    return call.collective is Collective.ALL_GATHER and len(set(call.shard_counts or ())) == 1


def gathered_shards(plan: Plan) -> Plan:
    """The plan of an all-gather of even shards: the whole of it is one gather."""
    total = plan.call.count * plan.call.dtype.itemsize
    whole = Copy(Region(Space.INPUT, 0, total // plan.world_size), Region(Space.OUTPUT, 0, total))
    return replace(plan, schedule="ncclAllGather", scratch_bytes=0, steps=(PlanStep(gather=whole),))


def gathered_inputs(plan: Plan) -> Plan:
    """An all-reduce in one step whose exchange is a gather: one operation of NCCL in place of 2 (N - 1).

    Args:
        plan: in one piece. It stays as it is if it packs messages, as do then those of all ranks: under ``ring``,
            where the message is longer than a ring chunk.
    """
    num_bytes = plan.call.count * plan.call.dtype.itemsize
    step, *others = plan.steps
    if others or step.packs or len(step.folds) != 1:
        return plan
    (fold,) = step.folds
    senders = {message.region: message.peer for message in step.recvs} | {step.sends[0].region: plan.rank}
    inputs = tuple(
        Region(Space.SCRATCH, senders[region] * num_bytes, num_bytes)
        for region in fold.inputs  # bits: the same operands in the same order
    )
    whole = Copy(Region(Space.INPUT, 0, num_bytes), Region(Space.SCRATCH, 0, plan.world_size * num_bytes))
    return replace(
        plan,
        schedule=f"{plan.schedule}, ncclAllGather",
        scratch_bytes=whole.dst.num_bytes,
        steps=(PlanStep(gather=whole, folds=(replace(fold, inputs=inputs),)),),
    )


def gathered_results(call: Call, piece_elems: int, world_size: int, make_part: Callable[[Call, str], Plan]) -> Plan:
    """An all-reduce by the direct schedule whose second half, the way back of the results, is a gather.

    A gather wants equal runs one after the other. So the message is cut into pieces, each an all-reduce of its own,
    dealt evenly to the ranks; what remains of the last one, less than 64 bytes a rank, goes to everybody with the first
    exchange.

    Args:
        piece_elems: elements of a piece; rounded down to what can be dealt evenly.
        make_part: this rank's plan for a part of the message by a schedule, in one piece.
    """
    item = call.dtype.itemsize
    grain = world_size * max(SHARD_ALIGN_BYTES // item, 1)
    piece_elems = max(piece_elems // grain, 1) * grain
    even = call.count // grain * grain
    assert even, "a message this short is not worth a gather"
    pieces = []
    slot_bytes = 0
    for index, start in enumerate(range(0, even, piece_elems)):
        part = make_part(replace(call, count=min(piece_elems, even - start)), "direct")
        slot_bytes = slot_bytes or part.scratch_bytes
        pieces.append(_shifted(_with_gather(part), start * item, index % _NUM_SLOTS * slot_bytes))
    scratch_bytes = min(len(pieces), _NUM_SLOTS) * slot_bytes
    reduces = [reduce for reduce, _ in pieces]
    if even < call.count:
        tail = make_part(replace(call, count=call.count - even), "oneshot")
        (rest,) = _shifted(tail.steps, even * item, scratch_bytes)
        scratch_bytes += tail.scratch_bytes
        reduces[0] = _together(reduces[0], rest)
    steps = [reduces[0]]
    # A gather comes after the next piece's exchange, beside which its own piece was folded.
    for reduce, (_, gather) in zip_longest(reduces[1:], pieces, fillvalue=None):  # type: ignore[misc]
        steps += [reduce or PlanStep(), gather]
    return replace(part, call=call, schedule="direct, ncclAllGather", scratch_bytes=scratch_bytes, steps=tuple(steps))


def _with_gather(plan: Plan) -> tuple[PlanStep, PlanStep]:
    """The second of two exchanges as a gather."""
    reduce, spread = plan.steps
    (own,) = {message.region for message in spread.sends}
    whole = Region(own.space, 0, plan.call.count * plan.call.dtype.itemsize)
    assert own == Region(own.space, plan.rank * own.num_bytes, whole.num_bytes // plan.world_size), "uneven shards"
    return reduce, PlanStep(gather=Copy(own, whole))


def _together(left: PlanStep, right: PlanStep) -> PlanStep:
    """Two steps as one exchange."""
    return PlanStep(
        packs=left.packs + right.packs,
        sends=left.sends + right.sends,
        recvs=left.recvs + right.recvs,
        unpacks=left.unpacks + right.unpacks,
        folds=left.folds + right.folds,
    )


def _shifted(steps: Sequence[PlanStep], data_bytes: int, scratch_bytes: int) -> tuple[PlanStep, ...]:
    """The same steps further on in the caller's memory and in scratch."""

    def region(there: Region) -> Region:
        more = scratch_bytes if there.space is Space.SCRATCH else data_bytes
        return replace(there, offset=there.offset + more)

    def copy(there: Copy) -> Copy:
        return Copy(region(there.src), region(there.dst))

    def message(there: Message) -> Message:
        return Message(there.peer, region(there.region))

    def fold(there: Fold) -> Fold:
        return replace(there, inputs=tuple(map(region, there.inputs)), output=region(there.output))

    return tuple(
        PlanStep(
            packs=tuple(map(copy, step.packs)),
            sends=tuple(map(message, step.sends)),
            recvs=tuple(map(message, step.recvs)),
            unpacks=tuple(map(copy, step.unpacks)),
            folds=tuple(map(fold, step.folds)),
            gather=None if step.gather is None else copy(step.gather),
        )
        for step in steps
    )
