# SPDX-License-Identifier: Apache-2.0
"""A plan made ready where ranks of a block read each other's memory; messages to other ranks go by NCCL as ever.

Of each step's messages inside the block:

    stage    copy what lies in input or output to the staging area            (on the main stream)
    sync     tell the receivers; wait for the senders; wait until an older slot has been read     (main)
    fetch    copy what is received to where it stays                          (side)
    folds    read the peers where they are the only readers                   (side)
    done     tell the senders that their memory has been read                 (side, or with the next sync)

At the end a rank waits until all it has sent has been read. So between calls nothing is under way, and whoever owns
a tensor may write to it behind the call, though peers have read it in place.

Only a sync waits for peers, and each tells before it waits. A sync of one step waits for what peers tell in the same
step or an earlier one; so by induction over the steps all come, whatever the GPUs do first.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from detcomm.cuda import native
from detcomm.cuda.native import MAX_COPIES, COp, CRegion
from detcomm.cuda.peer.layout import Layout, Sent, contains, is_borrowed, written
from detcomm.cuda.peer.signals import Ledger, Signals
from detcomm.cuda.program import (
    PEER_INPUT,
    PEER_OUTPUT,
    PEER_STAGING,
    Builder,
    Compiler,
    Program,
    fold_spec,
    own_region,
)
from detcomm.cuda.stream_order import MAIN, SIDE, Item, Span
from detcomm.plan import Copy, Fold, Message, Plan, PlanStep, Region, Space


class InPlace(NamedTuple):
    """Which of a call's own tensors peers have mapped."""

    input: bool
    output: bool


NOTHING = InPlace(False, False)


class _Order(enum.Enum):
    """What else than bytes of this rank has an order to keep."""

    ARRIVED = "what peers have made ready, by step"
    STAGED = "bytes of the staging area behind scratch"


class _Arrival(NamedTuple):
    """A message of a peer, told by its index in the block."""

    region: Region
    peer: int
    sent: Sent
    is_borrowed: bool


def make_peer_program(plan: Plan, layouts: Mapping[int, Layout], compiler: Compiler, in_place: InPlace) -> Program:
    """Make a plan ready.

    Args:
        layouts: of every rank of the block, by rank, ascending; this rank's own included.
        in_place: what peers may read where it lies. This rank's business alone: peers are told.

    Raises:
        UnsupportedError: a fold of more operands than a kernel takes.
    """
    return _PeerBuilder(plan, compiler, layouts=layouts, in_place=in_place).build()


@dataclass
class _PeerBuilder(Builder):
    layouts: Mapping[int, Layout] = field(default_factory=dict)
    in_place: InPlace = NOTHING
    _step: int = 0
    _arrivals: list[_Arrival] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ranks = list(self.layouts)
        self._own = self.layouts[self.plan.rank]
        self._mates = [rank for rank in self._ranks if rank != self.plan.rank]
        self._two_streams = self.is_pipelined()
        self._ledger = Ledger(self._ranks, self._own)

    def scratch_bytes(self) -> int:
        return self._own.num_bytes

    def add_step(self, index: int, step: PlanStep) -> None:
        self._step = index
        self._arrivals = []
        super().add_step(index, step)
        self._read_all()

    def add(self, item: Item) -> None:
        self._wait_for_readers(item.writes)
        super().add(item)

    # -- exchange -----------------------------------------------------------------------------------------------

    def add_exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        self._stage()
        senders = self._senders(recvs)
        self._sync(senders)
        for peer in senders:
            self._arrivals += self._from(peer, [message for message in recvs if message.peer == peer])
        self._fetch([arrival for arrival in self._arrivals if not arrival.is_borrowed])
        super().add_exchange(
            *([message for message in part if message.peer not in self._mates] for part in (sends, recvs))
        )

    def _stays(self, sent: Sent) -> bool:
        return sent.may_stay and (self.in_place.input if sent.region.space is Space.INPUT else self.in_place.output)

    def _sent(self) -> list[Sent]:
        """What this step sends inside the block, each region once."""
        messages = (sent for peer in self._own.receivers(self._step) for sent in self._own.to(self._step, peer))
        return list(dict.fromkeys(messages))

    def _stage(self) -> None:
        copies = [sent for sent in self._sent() if sent.is_copied and not self._stays(sent)]
        for first in range(0, len(copies), MAX_COPIES):
            batch = copies[first : first + MAX_COPIES]
            regions = []
            for sent in batch:
                regions += [own_region(sent.region), CRegion(sent.staged, sent.region.num_bytes, 2, 0, 0)]
            longest = max(sent.region.num_bytes for sent in batch)
            blocks = self.compiler.peer_copy_blocks(longest)
            op = COp(kind=native.COPY, num_blocks=blocks, kernel=self.compiler.copy())
            reads = [self.span(sent.region) for sent in batch]
            writes = [Span(_Order.STAGED, sent.staged, sent.staged + sent.region.num_bytes) for sent in batch]
            self.add(Item(op, regions, reads, writes, MAIN))

    def _senders(self, recvs: Sequence[Message]) -> list[int]:
        """Of this step's messages inside the block, beginning behind this rank: so not all read the same one first."""
        peers = {message.peer for message in recvs if message.region.num_bytes and message.peer in self._mates}
        own = self.plan.rank
        return sorted(peers, key=lambda peer: (peer - own) % self.plan.world_size)

    def _sync(self, senders: Sequence[int]) -> None:
        if not senders and not self._own.receivers(self._step):
            return
        signals = self._ledger.exchange(self._step, senders)
        if not self._two_streams:
            self._ledger.tell_done(signals)
        freed = self._ledger.free_next_slot(self._step, signals)
        awaited = self._ledger.steps_read_in(written(self.plan, self.plan.steps[self._step]))
        for step in awaited:
            freed += self._ledger.wait_for(step, signals)
        reads = [self._told_before(awaited)]
        for sent in self._sent():
            if sent.is_copied and not self._stays(sent):
                reads.append(Span(_Order.STAGED, sent.staged, sent.staged + sent.region.num_bytes))
                continue
            reads.append(self.span(sent.region))
            self._ledger.expose(self._step, reads[-1])
        self._add_sync(signals, reads, [self._arrived(), *freed], MAIN)

    def _wait_for_readers(self, writes: Sequence[Span]) -> None:
        """Before bytes are written that peers may still read."""
        signals: Signals = {}
        steps = self._ledger.steps_read_in(writes)
        if steps and not self._two_streams:
            self._ledger.tell_done(signals)
        freed = [span for step in steps for span in self._ledger.wait_for(step, signals)]
        self._add_sync(signals, [self._told_before(steps)], freed, MAIN)

    def _told_before(self, awaited: Sequence[int]) -> Span:
        """What a sync on the main stream comes behind on the side stream: what its peers may wait for meanwhile.

        Peers free a slot that is two steps old; and who waits for the readers of a later step is awaited likewise. So
        no rank needs two kernels to run at once: a GPU, or a graph, may put them in any order.
        """
        return Span(_Order.ARRIVED, 0, max([self._step - 1, *(step + 1 for step in awaited)]))

    def _add_sync(self, signals: Signals, reads: list[Span], writes: list[Span], stream: int) -> None:
        if signals:
            op = COp(kind=native.SYNC, num_blocks=1, kernel=self.compiler.sync())
            self.items.append(Item(op, [], reads, writes, stream, list(signals.values())))

    # -- what has arrived ---------------------------------------------------------------------------------------

    def _from(self, peer: int, recvs: Sequence[Message]) -> list[_Arrival]:
        """This step's messages of a peer, in order, where they lie."""
        sent = self.layouts[peer].to(self._step, self.plan.rank)
        regions = [message.region for message in recvs if message.region.num_bytes]
        assert [one.num_bytes for one in regions] == [one.region.num_bytes for one in sent], "plans do not match"
        return [
            _Arrival(region, self._index(peer), one, is_borrowed(self.plan, self._step, region))
            for region, one in zip(regions, sent, strict=True)
        ]

    def _fetch(self, arrivals: Sequence[_Arrival]) -> None:
        for first in range(0, len(arrivals), MAX_COPIES):
            batch = arrivals[first : first + MAX_COPIES]
            regions = []
            for arrival in batch:
                regions += [_remote(arrival, arrival.region), own_region(arrival.region)]
            longest = max(arrival.region.num_bytes for arrival in batch)
            self._peer_copy(longest, regions, [], [self.span(arrival.region) for arrival in batch])

    def _peer_copy(self, longest: int, regions: list[CRegion], reads: list[Span], writes: list[Span]) -> None:
        blocks = self.compiler.peer_copy_blocks(longest)
        op = COp(kind=native.PEER_COPY, num_blocks=blocks, kernel=self.compiler.peer_copy())
        self.add(Item(op, regions, [*reads, self._arrived()], writes, SIDE))

    def add_copies(self, copies: Sequence[Copy]) -> None:
        remote = [copy for copy in copies if copy.src.num_bytes and self._borrowed(copy.src) is not None]
        for first in range(0, len(remote), MAX_COPIES):
            batch = remote[first : first + MAX_COPIES]
            regions = [part for copy in batch for part in (self._region(copy.src), own_region(copy.dst))]
            longest = max(copy.src.num_bytes for copy in batch)
            self._peer_copy(longest, regions, [], [self.span(copy.dst) for copy in batch])
        super().add_copies([copy for copy in copies if copy not in remote])

    def add_fold(self, fold: Fold) -> None:
        local = [region for region in fold.inputs if self._borrowed(region) is None]
        if len(local) == len(fold.inputs):
            super().add_fold(fold)
            return
        op = self.fold_op(native.PEER_FOLD, fold, self.compiler.peer_fold(fold_spec(fold, self.plan)))
        regions = [self._region(region) for region in fold.inputs]  # in leaf order, wherever they lie
        reads = [*(self.span(region) for region in local), self._arrived()]
        self.add(Item(op, [*regions, own_region(fold.output)], reads, [self.span(fold.output)], SIDE))

    def _borrowed(self, region: Region) -> _Arrival | None:
        found = (one for one in self._arrivals if one.is_borrowed and contains(one.region, region))
        return next(found, None)

    def _region(self, region: Region) -> CRegion:
        arrival = self._borrowed(region)
        return own_region(region) if arrival is None else _remote(arrival, region)

    def _arrived(self) -> Span:
        return Span(_Order.ARRIVED, self._step, self._step + 1)

    def _read_all(self) -> None:
        """Behind the folds of a step: its senders may go on."""
        self._ledger.consume(sorted({self._ranks[arrival.peer] for arrival in self._arrivals}))
        # In the next step somebody may wait for it, so it is told before that step does anything else.
        if self._ledger.owes and (self._two_streams or not self._syncs_next()):
            signals: Signals = {}
            self._ledger.tell_done(signals)
            self._add_sync(signals, [], [self._arrived()], SIDE)

    def _syncs_next(self) -> bool:
        """Whether a sync comes next, on the same stream."""
        for step in self.plan.steps[self._step + 1 :]:
            messages = [message for message in (*step.sends, *step.recvs) if message.region.num_bytes]
            if messages or step.packs or step.folds or step.unpacks or step.gather is not None:
                return any(message.peer in self._mates for message in messages)
        return True

    def finish(self) -> None:
        everything = Span(_Order.ARRIVED, 0, len(self.plan.steps))
        self._add_sync(self._ledger.end(), [everything], [], MAIN)

    def _index(self, rank: int) -> int:
        return self._ranks.index(rank)


def _remote(arrival: _Arrival, part: Region) -> CRegion:
    """Part of what was received, at the peer."""
    sent, behind = arrival.sent, part.offset - arrival.region.offset
    staged = sent.staged + behind
    if not sent.may_stay:
        return CRegion(staged, part.num_bytes, PEER_STAGING, arrival.peer, 0)
    buffer = PEER_INPUT if sent.region.space is Space.INPUT else PEER_OUTPUT
    return CRegion(sent.region.offset + behind, part.num_bytes, buffer, arrival.peer, staged)
