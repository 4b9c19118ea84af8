# SPDX-License-Identifier: Apache-2.0
"""Programs of all ranks of a group, run as an order of accesses and not as bytes: who comes before whom, by what.

Streams, events, signals and messages are all that gives operations an order. Two accesses to one byte, one of them a
write, that nothing orders are a race, whether or not a run of fake GPUs shows it. And a rank whose GPU does one thing
at a time, in any order that its streams and events allow, must come to an end.

Knows addresses as spaces and offsets; moves no bytes.
"""

import random
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from detcomm.collectives import Collective
from detcomm.cuda import native
from detcomm.cuda.peer.program import InPlace
from detcomm.cuda.program import PEER_INPUT, PEER_STAGING, Program
from detcomm.cuda.stream_order import MAIN, SIDE
from tests.fake_peers import Peers

Clock = tuple[int, ...]


class Access(NamedTuple):
    """Bytes of a rank that an operation reads or writes."""

    owner: int
    space: str
    start: int
    stop: int
    writes: bool


class Done(NamedTuple):
    """An operation that was run: the first of its two ticks on its stream, and what it comes after."""

    text: str
    thread: int
    tick: int
    clock: Clock
    accesses: list[Access]


@dataclass
class _Node:
    """An operation of a rank, and what it waits for on its own GPU."""

    call: int
    number: int
    op: Any
    stream: int
    after: list["_Node"] = field(default_factory=list)
    clock: Clock | None = None


class Order:
    """Calls one after the other, on every rank.

    Args:
        calls: the programs of all ranks, for each call.
        is_in_place: for each call, whether input and output are the same memory.
        symmetric: for each call, which tensors of each rank peers have mapped.
    """

    def __init__(
        self,
        peers: Peers,
        calls: Sequence[Sequence[Program]],
        is_in_place: Sequence[bool],
        symmetric: Sequence[Sequence[InPlace] | None],
    ) -> None:
        self._peers, self._calls, self._is_in_place, self._symmetric = peers, calls, is_in_place, symmetric
        self._world_size = peers.world_size
        self._told: defaultdict[tuple[str, int, int], list[Clock]] = defaultdict(list)
        self._awaited: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._messages: defaultdict[tuple[int, int], deque[Clock]] = defaultdict(deque)
        self._gathered: defaultdict[tuple[int, int], dict[int, Clock]] = defaultdict(dict)
        self._ticks = [0] * (2 * self._world_size)
        self.done: list[Done] = []
        self._entered: set[int] = set()

    # -- running ------------------------------------------------------------------------------------------------

    def run(self, choose: str, seed: int = 0) -> None:
        """Run all of it.

        Args:
            choose: ``streams``: both streams of a GPU go on by themselves. Else a GPU does one thing at a time:
                ``issued``, as it was issued; ``main first`` or ``side first``, as far as events allow.

        Raises:
            AssertionError: it does not come to an end.
        """
        pick = random.Random(seed)
        graphs = [self._graph(rank) for rank in range(self._world_size)]
        while any(graphs):
            ranks = [rank for rank in range(self._world_size) if graphs[rank]]
            pick.shuffle(ranks)
            if not sum(self._advance(rank, graphs[rank], choose) for rank in ranks):
                stuck = [self._text(rank, graphs[rank][0]) for rank in ranks]
                raise AssertionError(f"nobody goes on, {choose}: {stuck}")

    def races(self) -> list[str]:
        """Accesses without an order."""
        found = []
        by_space: defaultdict[tuple[int, str], list[tuple[Access, Done]]] = defaultdict(list)
        for done in self.done:
            for access in done.accesses:
                by_space[access.owner, access.space].append((access, done))
        for accesses in by_space.values():
            for index, (mine, one) in enumerate(accesses):
                for theirs, other in accesses[:index]:
                    if not (mine.writes or theirs.writes) or one is other:
                        continue
                    if mine.start < theirs.stop and theirs.start < mine.stop and not _are_ordered(one, other):
                        found.append(f"{one.text} and {other.text}: {mine} {theirs}")
        return found

    def _advance(self, rank: int, nodes: list[_Node], choose: str) -> bool:
        """As far as it goes; whether it goes at all."""
        advances = False
        while nodes and self._advance_by_one(rank, nodes, choose):
            advances = True
        return advances

    def _advance_by_one(self, rank: int, nodes: list[_Node], choose: str) -> bool:
        heads = [next((node for node in nodes if node.stream == stream), None) for stream in (MAIN, SIDE)]
        ready = [node for node in heads if node and all(earlier.clock is not None for earlier in node.after)]
        if choose == "issued":
            ready = nodes[:1]
        elif choose != "streams":
            first = MAIN if choose == "main first" else SIDE
            ready = sorted(ready, key=lambda node: (node.stream != first, node.number))[:1]
        for node in ready:
            if self._do(rank, node):
                nodes.remove(node)
                return True
        return False

    def _do(self, rank: int, node: _Node) -> bool:
        """Run an operation, or the half of it that tells; whether it is done."""
        thread = 2 * rank + node.stream
        clock = [0] * (2 * self._world_size)
        for earlier in node.after:
            assert earlier.clock is not None
            clock = [max(pair) for pair in zip(clock, earlier.clock, strict=True)]
        if id(node) not in self._entered:
            self._entered.add(id(node))
            self._ticks[thread] += 2
            clock[thread] = self._ticks[thread] - 1
            self._tell(rank, node, tuple(clock))
        arrived = self._arrived(rank, node)
        if arrived is None:
            return False
        clock[thread] = self._ticks[thread] - 1
        for other in arrived:
            clock = [max(pair) for pair in zip(clock, other, strict=True)]
        accesses = [] if node.op is None else list(self._accesses(rank, node))
        if node.op is None:  # the caller: whatever it likes
            size = 1 << 40
            accesses = [Access(rank, space, 0, size, True) for space in ("input", "output")]
        self.done.append(Done(self._text(rank, node), thread, clock[thread], tuple(clock), accesses))
        clock[thread] = self._ticks[thread]
        node.clock = tuple(clock)
        return True

    # -- what orders ranks --------------------------------------------------------------------------------------

    def _tell(self, rank: int, node: _Node, clock: Clock) -> None:
        if node.op is None:
            return
        if node.op.kind == native.SYNC:
            for signal in self._signals(rank, node):
                peer = self._mate(rank, signal.peer)
                self._told["ready", rank, peer] += [clock] * signal.ready
                self._told["done", rank, peer] += [clock] * signal.done
                self._awaited[peer, rank] += signal.awaited
        if node.op.kind == native.EXCHANGE:
            for region in self._regions(rank, node)[: node.op.num_sends]:
                self._messages[rank, region.peer].append(clock)
        if node.op.kind == native.GATHER:
            self._gathered[node.call, node.number][rank] = clock

    def _arrived(self, rank: int, node: _Node) -> list[Clock] | None:
        """What the operation comes after on other ranks; ``None`` as long as it must wait."""
        if node.op is None:
            return []
        arrived: list[Clock] = []
        if node.op.kind == native.SYNC:
            for signal in self._signals(rank, node):
                peer = self._mate(rank, signal.peer)
                wanted = [("ready", self._awaited[peer, rank])] if signal.awaited else []
                if signal.most >= 0:
                    wanted.append(("done", len(self._told["ready", rank, peer]) - signal.most))
                for kind, count in wanted:
                    told = self._told[kind, peer, rank]
                    if len(told) < count:
                        return None
                    arrived += told[count - 1 : count] if count else []
        if node.op.kind == native.EXCHANGE:
            senders = [region.peer for region in self._regions(rank, node)[node.op.num_sends :]]
            if any(len(self._messages[peer, rank]) < senders.count(peer) for peer in senders):
                return None
            arrived = [self._messages[peer, rank].popleft() for peer in senders]
        if node.op.kind == native.GATHER:
            gathered = self._gathered[node.call, node.number]
            return None if len(gathered) < self._world_size else list(gathered.values())
        return arrived

    # -- one rank -----------------------------------------------------------------------------------------------

    def _graph(self, rank: int) -> list[_Node]:
        """Its operations as they are issued, the caller's accesses to its tensors before each call and behind it."""
        nodes: list[_Node] = []
        last: list[_Node | None] = [None, None]

        def add(node: _Node) -> None:
            before = last[node.stream]
            if before is not None:
                node.after.append(before)
            last[node.stream] = node
            nodes.append(node)

        for call, programs in enumerate(self._calls):
            add(_Node(call, len(nodes), None, MAIN))
            events: dict[int, _Node | None] = {}
            pending: list[list[_Node]] = [[], []]
            for op in programs[rank].ops:
                if op.kind == native.RECORD:
                    events[op.event] = last[op.stream]
                elif op.kind == native.WAIT:
                    awaited = events[op.event]
                    pending[op.stream] += [] if awaited is None else [awaited]
                else:
                    node = _Node(call, len(nodes), op, op.stream if programs[rank].uses_side_stream else MAIN)
                    node.after += pending[node.stream]
                    pending[node.stream] = []
                    add(node)
            end = _Node(call, len(nodes), None, MAIN)
            end.after += pending[MAIN]
            add(end)
        return nodes

    def _accesses(self, rank: int, node: _Node) -> Iterator[Access]:
        kind, regions = node.op.kind, self._regions(rank, node)
        if kind in (native.FOLD, native.PEER_FOLD):
            yield from (self._at(rank, node, region, False) for region in regions[:-1])
            yield self._at(rank, node, regions[-1], True)
        elif kind in (native.COPY, native.PEER_COPY, native.GATHER):
            for src, dst in zip(regions[::2], regions[1::2], strict=True):
                read, write = self._at(rank, node, src, False), self._at(rank, node, dst, True)
                if read[:3] != write[:3]:
                    yield from (read, write)
        elif kind == native.EXCHANGE:
            for index, region in enumerate(regions):
                yield self._at(rank, node, region, index >= node.op.num_sends)

    def _at(self, rank: int, node: _Node, region: Any, writes: bool) -> Access:
        owner, space, start = rank, ("input", "output", "staging")[region.buffer % 3], region.offset
        if region.buffer >= PEER_STAGING:
            owner, space = self._mate(rank, region.peer), "staging"
        if region.buffer >= PEER_INPUT:
            symmetric = self._symmetric[node.call]
            stays = symmetric is not None and symmetric[owner][region.buffer - PEER_INPUT]
            space = ("input", "output")[region.buffer - PEER_INPUT] if stays else "staging"
            start = region.offset if stays else region.staged
        call = self._calls[node.call][owner].plan.call
        if self._is_in_place[node.call] and space != "staging":
            start += _in_place_offset(call, owner, space)
            space = "output"
        return Access(owner, space, start, start + region.num_bytes, writes)

    def _regions(self, rank: int, node: _Node) -> list[Any]:
        first = node.op.first_region
        return list(self._calls[node.call][rank].regions[first : first + node.op.num_regions])

    def _signals(self, rank: int, node: _Node) -> list[Any]:
        first = node.op.first_region
        return list(self._calls[node.call][rank].signals[first : first + node.op.num_regions])

    def _mate(self, rank: int, index: int) -> int:
        return self._peers.block_of(rank)[index]

    def _text(self, rank: int, node: _Node) -> str:
        what = "the caller" if node.op is None else f"operation {node.number} of kind {node.op.kind}"
        return f"rank {rank}, call {node.call}, {what}"


def _in_place_offset(call: Any, rank: int, space: str) -> int:
    start: int = 0 if call.shard_counts is None else call.shard_starts[rank] * call.dtype.itemsize
    shorter = {Collective.REDUCE_SCATTER: "output", Collective.ALL_GATHER: "input"}.get(call.collective)
    return start if space == shorter else 0


def _are_ordered(one: Done, other: Done) -> bool:
    return other.clock[one.thread] > one.tick or one.clock[other.thread] > other.tick
