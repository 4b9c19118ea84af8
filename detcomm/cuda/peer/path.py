# SPDX-License-Identifier: Apache-2.0
"""One group's mapped memory, call by call: which segment a call uses, what peers may read where it lies, who is late.

A segment is a staging area and a signal pad of each rank of the block. Eager calls of a group come one after the other
on the GPU and share one; the calls of one captured graph share another, since a graph may be replayed beside anything.

Knows addresses, neither plans nor tensors.
"""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

from detcomm.cuda.native import CPeers
from detcomm.cuda.peer.fused import SLICE_BYTES
from detcomm.cuda.peer.program import NOTHING, InPlace
from detcomm.cuda.peer_memory.memory import PeerMemory, Segment
from detcomm.cuda.prepared import Prepared
from detcomm.errors import PeerTimeoutError

STAGING_BYTES = 32 << 20
"""Of the eager segment, if ``scratch_bytes`` is not less: three slots of the usual pieces, and some."""

LEAST_STAGING_BYTES = 16 << 20
"""Room for every call of up to 16 ranks, by any schedule, in its shortest pieces."""

LEAST_FOR_FUSED = 8 << 20
"""A staging area that has room for the slices of short calls beside the slots of others."""

PAD_BYTES = 1024
"""Of ``Pad`` in ``native/kernels/peers.cuh``: the first is that of syncs, then one for each block of short calls."""

_GRAPH_BYTES = 2 << 20
"""Segments of graphs are multiples of this."""

_ERROR_PEER, _ERROR_KIND = 2, 3
"""Words of the host, as ``kErrorPeer`` and ``kErrorKind`` of ``native/kernels/peers.cuh``."""
_KINDS = {1: "to make ready what it sends", 2: "to read what it was sent"}


class Seat(NamedTuple):
    """What one call uses.

    Attributes:
        scratch: the address of this rank's staging area.
        address: of ``peers``, for native code.
    """

    scratch: int
    staging_bytes: int
    peers: CPeers
    address: int


class PeerPath:
    """The peer memory of one group on one device.

    Args:
        timeout_s: how long the GPU waits for a peer.
        most_blocks: that may wait for peers in one launch.
        give_back: called when they do no more.

    Attributes:
        ranks: of the block, ascending.
        staging_bytes: of the eager segment, without the slices of short calls.
    """

    def __init__(self, memory: PeerMemory, timeout_s: float, most_blocks: int, give_back: Callable[[], None]) -> None:
        self.most_blocks = most_blocks
        self._give_back = give_back
        self.memory = memory
        self._timeout_s = timeout_s
        self._eager = self._seat(memory.segment)
        self._captured: dict[int, list[Seat]] = {}
        self.ranks = memory.ranks
        self.staging_bytes = self._eager.staging_bytes

    def seat(self, num_bytes: int, capture: int) -> Seat:
        """What a call uses that stages so much.

        Args:
            num_bytes: the same on all ranks of the block: where a graph needs a segment, they make it together.
            capture: the number of the graph's capture; 0 for none.
        """
        if not capture:
            assert num_bytes <= self._eager.staging_bytes, "a plan that its bound should have cut shorter"
            return self._eager
        seats = self._captured.setdefault(capture, [])
        for seat in seats:
            if num_bytes <= seat.staging_bytes:
                return seat
        size = -(-max(num_bytes, 1) // _GRAPH_BYTES) * _GRAPH_BYTES
        seat = self._seat(self.memory.add_segment(size, self._timeout_s))
        seats.append(seat)
        return seat

    def leave_in_place(self, seat: Seat, call: Prepared, input: int, output: int) -> InPlace:
        """Which of a call's tensors, given by address, peers have mapped; where, they are told by the call."""
        regions = self.memory.regions
        here, there = regions.find(input, call.input_bytes), regions.find(output, call.output_bytes)
        places = seat.peers.places
        places[0] = 0 if here is None else here.region << 48 | here.offset
        places[1] = 0 if there is None else there.region << 48 | there.offset
        return NOTHING if here is None and there is None else InPlace(here is not None, there is not None)

    def check(self) -> None:
        """Ask whether a peer has kept the GPU waiting for too long.

        Raises:
            PeerTimeoutError: names the peer.
        """
        words = self.memory.words
        if words.error():
            peer, kind = self.ranks[words.read(_ERROR_PEER)], _KINDS[words.read(_ERROR_KIND)]
            raise PeerTimeoutError(f"the GPU has waited {self._timeout_s:g} s for rank {peer} {kind}")

    def abort(self) -> None:
        """End all waits on the GPU. From any thread."""
        self.memory.abandon()

    def close(self) -> None:
        """The GPU is done with it. Idempotent."""
        give_back, self._give_back = self._give_back, _nothing
        give_back()
        self.memory.close()

    def _seat(self, segment: Segment) -> Seat:
        memory = self.memory
        slices = self.most_blocks * SLICE_BYTES if segment is memory.segment else 0
        peers = CPeers(
            table=memory.regions.table,
            words=memory.words.device,
            patience_ns=int(self._timeout_s * 1e9),
            fused_offset=segment.staging_bytes - slices,
            slice_bytes=SLICE_BYTES,
            pad_bytes=PAD_BYTES,
            index=memory.index,
            num_peers=len(memory.ranks),
        )
        for index, (staging, pad) in enumerate(zip(segment.staging, segment.pads, strict=True)):
            peers.staging[index], peers.pads[index] = staging, pad
        own = segment.staging[memory.index]
        return Seat(own, segment.staging_bytes - slices, peers, ctypes.addressof(peers))


def _nothing() -> None:
    """What is given back once is not given back again: others would get more than there is."""
