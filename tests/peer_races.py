# SPDX-License-Identifier: Apache-2.0
"""Whether programs whose ranks read each other's memory can race or lock up, found without running a kernel.

All ranks' operations are played in an order that their streams, events and signals allow, and each has a vector clock.
Two operations on the same bytes, one of which writes, must be ordered by the clocks: then they are in every order that
is allowed, however the GPUs are timed. With one queue a rank, as ``CUDA_DEVICE_MAX_CONNECTIONS=1`` leaves it, what can
not go on stops everything behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from detcomm.collectives import Collective
from detcomm.cuda import native
from detcomm.cuda.peer.program import InPlace
from detcomm.cuda.program import Program

Clock = tuple[int, ...]
_INPUT, _OUTPUT, _STAGING = range(3)
"""Buffers of an operation."""

_TENSORS, _GATHERED = 0, 1
"""What an access tells apart besides staging areas: input and output are taken for the same memory."""


class Access(NamedTuple):
    """Bytes of one rank, touched by an operation of some rank."""

    owner: int
    buffer: int
    start: int
    stop: int
    writes: bool


class Done(NamedTuple):
    """An operation with the clock behind it: its thread, its time on it, what it is behind."""

    what: str
    thread: int
    time: int
    behind: Clock
    accesses: list[Access]


@dataclass
class _Rank:
    program: Program
    ops: list[native.COp]
    queues: list[list[native.COp]]
    clocks: list[list[int]]
    records: dict[int, int]
    """For each wait the record that is the event's last one when the wait is issued."""
    events: dict[int, Clock] = field(default_factory=dict)
    awaited: dict[int, int] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)


class Play:
    """All ranks of one block.

    Args:
        in_place: which tensors of each rank peers read where they lie.
        num_queues: of each rank: 2, a stream each; or 1.
    """

    def __init__(self, programs: Sequence[Program], in_place: Sequence[InPlace], num_queues: int) -> None:
        self.in_place = in_place
        self.num_threads = 2 * len(programs)
        self.ranks = []
        for program in programs:
            ops = list(program.ops)
            queues = [ops] if num_queues == 1 else [[op for op in ops if op.stream == stream] for stream in (0, 1)]
            clocks = [[0] * self.num_threads for _ in range(2)]
            self.ranks.append(_Rank(program, ops, [list(queue) for queue in queues], clocks, _records(ops)))
        self.ready: dict[tuple[int, int], list[Clock]] = {}
        self.read: dict[tuple[int, int], list[Clock]] = {}
        self.done: list[Done] = []

    def run(self) -> list[str]:
        """Pairs that race; a lock-up is one, too."""
        moved = True
        while moved:
            moved = False
            for number, rank in enumerate(self.ranks):
                for queue in rank.queues:
                    while queue and self._step(number, rank, queue[0]):
                        queue.pop(0)
                        moved = True
        if any(queue for rank in self.ranks for queue in rank.queues):
            return [f"rank {number} stops" for number, rank in enumerate(self.ranks) if any(rank.queues)]
        for number, rank in enumerate(self.ranks):
            self._own_all(number, rank.clocks[0])
        return self._races()

    def _step(self, number: int, rank: _Rank, op: native.COp) -> bool:
        """Whether the operation could be done."""
        clock = rank.clocks[op.stream]
        if op.kind == native.RECORD:
            rank.events[id(op)] = tuple(clock)
        elif op.kind == native.WAIT:
            if rank.records[id(op)] not in rank.events:
                return False
            _join(clock, rank.events[rank.records[id(op)]])
        elif op.kind == native.SYNC:
            return self._sync(number, rank, op, clock)
        else:
            self._touch(number, rank, op, clock)
        return True

    def _sync(self, number: int, rank: _Rank, op: native.COp, clock: list[int]) -> bool:
        signals = rank.program.signals[op.first_region : op.first_region + op.num_regions]
        if id(op) not in rank.told:
            rank.told.add(id(op))
            clock[2 * number + op.stream] += 1
            for signal in signals:
                self.read.setdefault((number, signal.peer), []).extend([tuple(clock)] * signal.done)
                self.ready.setdefault((number, signal.peer), []).extend([tuple(clock)] * signal.ready)
                rank.sent[signal.peer] = rank.sent.get(signal.peer, 0) + signal.ready
        waits = []
        for signal in signals:
            wanted = rank.awaited.get(signal.peer, 0) + signal.awaited
            waits.append((self.ready.get((signal.peer, number), []), wanted if signal.awaited else 0))
            read = rank.sent.get(signal.peer, 0) - signal.most if signal.most >= 0 else 0
            waits.append((self.read.get((signal.peer, number), []), read))
        if any(len(clocks) < wanted for clocks, wanted in waits):
            return False
        for clocks, wanted in waits:
            if wanted > 0:
                _join(clock, clocks[wanted - 1])
        for signal in signals:
            rank.awaited[signal.peer] = rank.awaited.get(signal.peer, 0) + signal.awaited
        return True

    def _touch(self, number: int, rank: _Rank, op: native.COp, clock: list[int]) -> None:
        regions = rank.program.regions[op.first_region : op.first_region + op.num_regions]
        if op.kind in (native.FOLD, native.PEER_FOLD):
            writes = [False] * (len(regions) - 1) + [True]
        else:
            assert op.kind in (native.COPY, native.PEER_COPY)
            writes = [False, True] * (len(regions) // 2)
        thread = 2 * number + op.stream
        clock[thread] += 1
        accesses = [self._access(number, region, wrote) for region, wrote in zip(regions, writes, strict=True)]
        what = f"rank {number} stream {op.stream} operation {clock[thread]} ({op.kind})"
        self.done.append(Done(what, thread, clock[thread], tuple(clock), accesses))

    def _own_all(self, number: int, clock: list[int]) -> None:
        """Behind the call its rank may write to everything that is its own: the caller, or the next call."""
        clock[2 * number] += 1
        everything = [Access(number, buffer, 0, 1 << 62, True) for buffer in (_TENSORS, _STAGING, _GATHERED)]
        self.done.append(
            Done(f"rank {number} behind the call", 2 * number, clock[2 * number], tuple(clock), everything)
        )

    def _access(self, number: int, region: Any, writes: bool) -> Access:
        owner, buffer, offset = number, region.buffer, region.offset
        if buffer > 2:
            owner, stays = region.peer, buffer > 3 and self.in_place[region.peer][buffer - 4]
            offset = region.offset if buffer == 3 or stays else region.staged
            buffer = buffer - 4 if stays else _STAGING
        call = self.ranks[owner].program.plan.call
        if buffer == _STAGING:
            return Access(owner, _STAGING, offset, offset + region.num_bytes, writes)
        if call.collective is Collective.ALL_GATHER and buffer == _INPUT:  # in place it is copied onto itself
            return Access(owner, _GATHERED, offset, offset + region.num_bytes, writes)
        if call.collective is Collective.REDUCE_SCATTER and buffer == _OUTPUT:  # as if in place
            offset += call.shard_starts[owner] * call.dtype.itemsize
        return Access(owner, _TENSORS, offset, offset + region.num_bytes, writes)

    def _races(self) -> list[str]:
        found = []
        for index, later in enumerate(self.done):
            for earlier in self.done[:index]:
                if later.behind[earlier.thread] >= earlier.time or earlier.behind[later.thread] >= later.time:
                    continue
                if any(_clash(a, b) for a in earlier.accesses for b in later.accesses):
                    found.append(f"{earlier.what} and {later.what}")
        return found


def _records(ops: Sequence[native.COp]) -> dict[int, int]:
    last: dict[int, int] = {}
    found = {}
    for op in ops:
        if op.kind == native.RECORD:
            last[op.event] = id(op)
        elif op.kind == native.WAIT:
            found[id(op)] = last[op.event]
    return found


def _clash(one: Access, other: Access) -> bool:
    return one[:2] == other[:2] and one.start < other.stop and other.start < one.stop and (one.writes or other.writes)


def _join(clock: list[int], other: Clock) -> None:
    clock[:] = [max(pair) for pair in zip(clock, other, strict=True)]
