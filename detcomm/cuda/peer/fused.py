# SPDX-License-Identifier: Apache-2.0
"""Short calls in one launch: which plans have the form for it, and what each of their blocks does.

The form: all that is sent lies in the input, or is the result of the one fold; everything received is an operand of
that fold, or goes to the output. That is what the oneshot and direct schedules make of one piece. All ranks must be
of one block, and all of their plans must have the form, so every rank looks at all plans.

A message's bytes are dealt to the blocks in equal parts, a block's parts lie one after the other in its slice of the
staging area. Knows neither addresses nor CUDA.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from detcomm.cuda import native
from detcomm.cuda.native import MAX_PEERS, COp, CRegion
from detcomm.cuda.program import PEER_STAGING, Compiler, Counts, Program, fold_spec, own_region, program_of
from detcomm.cuda.stream_order import Item
from detcomm.plan import Copy, Fold, Message, Plan, PlanStep, Region, Space

FUSED_BYTES = 1 << 20
"""The longest message that goes in one launch: from here on the launches of the other way are hidden."""

BYTES_PER_BLOCK = 32 << 10
"""Of a message: more blocks copy faster, and all of them tell and wait."""

MOST_BLOCKS = 16
SLICE_BYTES = 96 << 10
"""Of the staging area, for each block: its part of the longest message, and what rounding up adds."""

_VECTOR_BYTES = 16


class Form(NamedTuple):
    """A plan as one or two rounds.

    Attributes:
        staged: the distinct regions that are sent in the first round.
        results: the messages of the second round that are received.
    """

    plan: Plan
    sends: tuple[Message, ...]
    staged: tuple[Region, ...]
    recvs: tuple[Message, ...]
    copies: tuple[Copy, ...]
    fold: Fold | None
    results: tuple[Message, ...]
    num_rounds: int

    def offsets(self, num_blocks: int) -> dict[Region, int]:
        """Where in a block's slice its part of each region lies; that of the fold's output last."""
        offsets, size = {}, 0
        regions = self.staged if self.fold is None or self.num_rounds < 2 else (*self.staged, self.fold.output)
        for region in regions:
            offsets[region] = size
            size += part_bytes(region.num_bytes, num_blocks)
        return offsets

    def slice_bytes(self, num_blocks: int) -> int:
        """What a block needs of the staging area."""
        return sum(part_bytes(region.num_bytes, num_blocks) for region in self.offsets(num_blocks))


def part_bytes(num_bytes: int, num_blocks: int) -> int:
    """Of a block; the last ones may have less, or nothing."""
    return -(-num_bytes // (_VECTOR_BYTES * num_blocks)) * _VECTOR_BYTES


def blocks_for(message_bytes: int, most: int) -> int:
    """How many blocks share a call. The same on all ranks."""
    return max(1, min(-(-message_bytes // BYTES_PER_BLOCK), most))


def forms_of(plans: Mapping[int, Plan]) -> dict[int, Form] | None:
    """All ranks' plans in this form; ``None`` if one of them has another."""
    if len(plans) > MAX_PEERS:
        return None
    second = {index for plan in plans.values() for index, step in enumerate(plan.steps) if index and _has_work(step)}
    if len(second) > 1:
        return None
    forms = {rank: _form_of(plan, max(second, default=0)) for rank, plan in plans.items()}
    found = {rank: form for rank, form in forms.items() if form is not None}
    return found if len(found) == len(plans) else None


def make_fused_program(forms: Mapping[int, Form], rank: int, compiler: Compiler, num_blocks: int) -> Program:
    """A rank's part of a call in one launch.

    Args:
        forms: of all ranks of the group, by rank, ascending.
        num_blocks: the same on all ranks.
    """
    form = forms[rank]
    ranks = list(forms)
    offsets = {peer: other.offsets(num_blocks) for peer, other in forms.items()}
    fold, own = form.fold, offsets[rank]
    staged = [_region(region, 0, own[region]) for region in form.staged]
    arrived = {message.region: message.peer for message in form.recvs}
    operands: list[CRegion] = []
    for region in () if fold is None else fold.inputs:
        peer = arrived.get(region)
        if peer is None:
            operands.append(own_region(region))
        else:
            sent = _sent_to(forms[peer], rank)
            operands.append(CRegion(0, region.num_bytes, PEER_STAGING, ranks.index(peer), offsets[peer][sent]))
    output = [] if fold is None else [_region(fold.output, 0, own.get(fold.output, 0))]
    fetched = []
    for message in form.recvs:
        if message.region.space is Space.OUTPUT:
            sent = _sent_to(forms[message.peer], rank)
            fetched.append(_region(message.region, ranks.index(message.peer), offsets[message.peer][sent]))
    for message in form.results:
        result = forms[message.peer].fold
        assert result is not None, "a result without a fold"
        fetched.append(_region(message.region, ranks.index(message.peer), offsets[message.peer][result.output]))
    copies = [own_region(region) for copy in form.copies for region in (copy.src, copy.dst)]
    op = COp(
        kind=native.PEER_FUSED,
        num_blocks=num_blocks,
        kernel=compiler.fused(None if fold is None else fold_spec(fold, form.plan)),
        count=0 if fold is None else fold.count,
        divisor=form.plan.world_size,
        num_rounds=form.num_rounds,
        parts=(len(staged), len(operands), len(fetched), len(form.copies)),
    )
    item = Item(op, [*staged, *operands, *output, *fetched, *copies], [], [])
    counts = _counts(form, staged, operands, fetched)
    return program_of(form.plan, [op], [item], False, 0, counts)


def _has_work(step: PlanStep) -> bool:
    moves = [*step.sends, *step.recvs]
    is_busy = any(message.region.num_bytes for message in moves) or any(fold.count for fold in step.folds)
    copies = any(copy.src.num_bytes for copy in (*step.packs, *step.unpacks))
    return is_busy or copies or step.gather is not None


def _form_of(plan: Plan, second: int) -> Form | None:
    first, last = plan.steps[0], plan.steps[second] if 0 < second < len(plan.steps) else PlanStep()
    if any(step.gather is not None for step in (first, last)) or not plan.steps:
        return None
    sends, recvs, results = _filled(first.sends), _filled(first.recvs), _filled(last.recvs)
    folds = [fold for fold in first.folds if fold.count]
    fold = folds[0] if folds else None
    arrived = {message.region for message in recvs}
    has_form = (
        len(folds) <= 1
        and not _copied(first.unpacks, last.packs, last.unpacks)
        and not any(each.count for each in last.folds)
        and all(message.region.space is Space.INPUT for message in sends)
        and all(copy.src.space is Space.INPUT and copy.dst.space is Space.OUTPUT for copy in _copied(first.packs))
        and all(message.region.space is Space.OUTPUT for message in results)
        and all(fold is not None and message.region == fold.output for message in _filled(last.sends))
    )
    if fold is not None:
        has_form = (
            has_form
            and fold.final
            and all(fold.leaves)
            and fold.output.space is Space.OUTPUT
            and all(region.space is Space.INPUT or region in arrived for region in fold.inputs)
            and arrived <= set(fold.inputs)
        )
    else:
        has_form = has_form and all(region.space is Space.OUTPUT for region in arrived)
    if not has_form:
        return None
    staged = tuple(dict.fromkeys(message.region for message in sends))
    return Form(plan, sends, staged, recvs, _copied(first.packs), fold, results, 2 if second else 1)


def _filled(messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(message for message in messages if message.region.num_bytes)


def _copied(*copies: Sequence[Copy]) -> tuple[Copy, ...]:
    return tuple(copy for each in copies for copy in each if copy.src.num_bytes)


def _sent_to(form: Form, rank: int) -> Region:
    """What goes to a rank in the first round: one message, as schedules of this form have it."""
    (region,) = (message.region for message in form.sends if message.peer == rank)
    return region


def _region(region: Region, peer: int, offset: int) -> CRegion:
    there = own_region(region, peer)
    there.staged = offset
    return there


def _counts(form: Form, staged: list[CRegion], operands: list[CRegion], fetched: list[CRegion]) -> Counts:
    def total(regions: Sequence[CRegion]) -> int:
        return sum(region.num_bytes for region in regions)

    stored = 0 if form.fold is None else form.fold.output.num_bytes * form.num_rounds
    copied = total(staged) + total(fetched) + sum(copy.src.num_bytes for copy in form.copies)
    from_peers = total(fetched) + total([region for region in operands if region.buffer == PEER_STAGING])
    return Counts(0, 1, 0, 0, 0, total(operands) + stored, 2 * copied, from_peers)
