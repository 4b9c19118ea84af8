# SPDX-License-Identifier: Apache-2.0
"""One rank's end of the memory that the ranks of a block have mapped from each other: segments, regions, host words.

A segment is made at the group's connection, others later where a captured graph must not share it; memory of the user
is registered when the user asks for it. All of these are collective, in the same order on all ranks of the block.
"""

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs

from detcomm.cuda.peer_memory.device_access import DeviceAccess
from detcomm.cuda.peer_memory.host_words import HostWords
from detcomm.cuda.peer_memory.meeting import Meeting
from detcomm.cuda.peer_memory.regions import MAX_REGIONS, Regions, Span
from detcomm.cuda.peer_memory.registration import Mappings, Part, Registration
from detcomm.cuda.peer_memory.retirement import PATIENCE_S, retire
from detcomm.cuda.peer_memory.sharing import PAD_BYTES, Provider, Share, SharedPiece, share_piece
from detcomm.errors import DetcommError, TransportError

_left: list[Any] = []
"""What peers may still read after a failure: kept until the end of the process."""


@attrs.frozen
class Segment:
    """Device memory of each rank of a block, mapped here.

    Attributes:
        region: the number of its staging areas among the regions, equal on all ranks.
        pads: addresses of the signal pads, by index in the block; zero before any peer could see them.
        staging: addresses of the staging areas, by index; multiples of 512.
        staging_bytes: of each, equal on all ranks.
    """

    region: int
    pads: tuple[int, ...]
    staging: tuple[int, ...]
    staging_bytes: int
    pad_bytes: int = PAD_BYTES


class PeerMemory:
    """What this rank and its peers of the block see of each other. Made by ``connect_peer_memory``.

    Attributes:
        ranks: the group ranks of the block, ascending.
        index: of this rank in ``ranks``.
        provider: what shares the memory, for texts.
        segment: of calls that are no part of a graph.
        words: what host and kernels tell each other.
        regions: what of this rank's memory its peers find, and where.

    Args:
        device: its number in this process.
        provide: makes a piece of memory to share.
    """

    def __init__(
        self,
        meeting: Meeting,
        access: DeviceAccess,
        device: int,
        provide: Provider,
        provider: str,
        words: HostWords,
        regions: Regions,
        first: SharedPiece,
    ) -> None:
        self.ranks = meeting.ranks
        self.index = meeting.index
        self.provider = provider
        self.words = words
        self.regions = regions
        self._meeting = meeting
        self._access = access
        self._device = device
        self._provide = provide
        self._lock = threading.Lock()
        self._shares: list[Share] = []
        self._registered: list[_Registered] = []
        self._unused = list(range(MAX_REGIONS))  # ascending; the same on all ranks of the block
        self._is_closed = False
        self._is_freed = False
        self._is_abandoned = False
        self.segment = self._take_over(first)

    def add_segment(self, staging_bytes: int, timeout_s: float) -> Segment:
        """Another segment, for calls that must not share the first; also while a graph is captured.

        Raises:
            PeerTimeoutError: ranks did not come; names them.
            TransportError: a rank could not, with one text on all ranks of the block; or the group has failed.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            if not self._unused:
                raise TransportError(f"group {self._meeting.name}: more than {MAX_REGIONS} segments and registrations")
            enter = partial(self.regions.map_region, self._unused[0])
            piece = share_piece(self._provide, self._access, self._meeting, staging_bytes, enter, deadline)
            if isinstance(piece, str):
                raise TransportError(f"group {self._meeting.name}: no further peer memory: {piece}")
            return self._take_over(piece)

    def register(self, parts: Sequence[Part], kept: Any, timeout_s: float) -> str:
        """Have the peers map memory of this rank; all ranks of the block call this, with as much as each has.

        Args:
            parts: beginnings and bytes of parts of the driver's allocations; none of them registered already.
            kept: keeps that memory alive; kept until ``deregister`` or the end of the group.

        Returns:
            Why it could not be, the same text on all ranks of the block; empty if it is done.

        Raises:
            PeerTimeoutError: ranks did not come; names them.
            TransportError: the group has failed.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            registration = Registration(self._access, self._device, self._meeting, parts)
            try:
                return self._register(registration, parts, kept, deadline)
            finally:
                registration.close()

    def deregister(self, kept: Any, timeout_s: float, patience_s: float = PATIENCE_S) -> None:
        """Take back what was registered with ``kept``, on all ranks of the block; the GPU is done with it.

        ``kept`` is let go of when all peers have unmapped its memory, see ``retirement``.

        Raises:
            PeerTimeoutError: ranks did not come; names them.
            TransportError: the group has failed.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            gone = [registered for registered in self._registered if registered.kept is kept]
            numbers = [number for registered in gone for number in registered.numbers]
            self.regions.disown(set(numbers))
            self._meeting.exchange("deregister", "", deadline)  # from now on no peer says that it uses them
            for registered in gone:
                registered.mappings.close()
            self._unused = sorted([*self._unused, *numbers])
            self._registered = [registered for registered in self._registered if registered.kept is not kept]
            retire(self._meeting, gone.clear, patience_s)  # which lets go of what is kept

    def abandon(self) -> None:
        """The group has failed: kernels that wait return. Waits for nobody, frees nothing. From any thread."""
        self.words.abort()
        if not self._is_abandoned:
            self._is_abandoned = True
            _left.append(self)

    def close(self, patience_s: float = PATIENCE_S) -> bool:
        """Give everything back; the GPU is done with it. Idempotent.

        What peers may still have mapped is freed when they have let go, see ``retirement``; after ``abandon`` it is
        left to the end of the process.

        Returns:
            Whether all is freed by now.
        """
        with self._lock:
            if self._is_closed or self._is_abandoned:
                return self._is_freed
            self._is_closed = True
            for registered in self._registered:
                registered.mappings.close()
            for share in self._shares:
                share.unmap()
            self.words.close()
            if not self._registered and all(share.outlives_its_owner for share in self._shares):
                self._free()
            else:
                retire(self._meeting, self._free, patience_s)
            return self._is_freed

    # -- in the lock --------------------------------------------------------------------------------------------

    def _free(self) -> None:
        for share in self._shares:
            share.free()
        self._registered.clear()
        self._access.close()
        self._is_freed = True

    def _take_over(self, piece: SharedPiece) -> Segment:
        region = self._unused.pop(0)
        self._shares.append(piece.share)
        own = piece.staging[self.index]
        self.regions.own((Span(own, own + piece.staging_bytes, region),))
        return Segment(region, piece.pads, piece.staging, piece.staging_bytes)

    def _register(self, registration: Registration, parts: Sequence[Part], kept: Any, deadline: float) -> str:
        reason = registration.tell(deadline)
        if not reason and registration.num_parts > len(self._unused):
            reason = f"{registration.num_parts} parts of memory; there is room for {len(self._unused)} more in a group"
        if reason:
            return reason
        numbers = self._unused[: registration.num_parts]
        mappings = Mappings()
        error = ""
        try:
            registration.map(mappings, deadline)
            self.regions.map({(index, numbers[part]): start for (index, part), start in mappings.addresses.items()})
        except DetcommError as failure:
            error = str(failure)
        reason = self._meeting.agree("registered", error, deadline)
        if reason:  # what stands in the table then is overwritten before any rank speaks of those numbers
            mappings.close()
            return reason
        self._registered.append(_Registered(kept, mappings, tuple(numbers)))
        self._unused = self._unused[registration.num_parts :]
        spans = zip(numbers, parts, strict=False)  # other ranks may have more parts
        self.regions.own(tuple(Span(start, start + num_bytes, region) for region, (start, num_bytes) in spans))
        return ""


@attrs.frozen
class _Registered:
    """One registration.

    Attributes:
        kept: keeps this rank's memory alive.
        numbers: of its regions, as many as the rank with most of them has.
    """

    kept: Any
    mappings: Mappings
    numbers: tuple[int, ...]
