# SPDX-License-Identifier: Apache-2.0
"""Steps over gloo's point-to-point messages, on a gloo context of detcomm's own. The only transport that needs torch.

gloo matches messages of one tag between a pair in posting order. A wait that times out makes gloo close every
connection of the context, on which the peers' waits fail too; ``abort`` uses that. But gloo does not tell those who
wait for a message that is half sent or half received as its connection closes: they would sleep until their timeout.
So a thread of this transport's waits in gloo, and ``exchange`` for that thread.
"""

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from detcomm.errors import PeerTimeoutError, TransportError
from detcomm.stock_gloo import unblock
from detcomm.transports.base import Parcel, Transport
from detcomm.transports.waiting_thread import WaitingThread

_TAG = 1
_SHORTEST_WAIT = timedelta(milliseconds=1)
"""gloo takes zero for the default of the context, and cuts to whole milliseconds."""

_OVERTIME = timedelta(milliseconds=2)
"""Added to a wait, so that one that times out ends after the deadline and not a rounding before it."""

_STUCK_S = 60.0
"""gloo's waits end at their deadline; on a busy machine not to the second."""


class GlooTransport(Transport):
    """Moves the bytes of a step with ``send`` and ``recv`` of a ``ProcessGroupGloo``.

    Args:
        group: connected, and used by nothing else.
    """

    name = "gloo"

    def __init__(self, group: Any, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = group
        self._failure: str | None = None
        self._failing = threading.Lock()
        self._waiting = WaitingThread(f"detcomm-gloo-{rank}")

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], timeout_s: float) -> None:
        group = self._group
        if self._failure is not None or group is None:
            raise TransportError(self._failure or "the gloo transport is closed")
        deadline = time.monotonic() + timeout_s
        # Receives first, so that what arrives at once goes straight to its place.
        parcels = [parcel for parcel in recvs if parcel.data.size]
        num_recvs = len(parcels)
        parcels += [parcel for parcel in sends if parcel.data.size]
        works: list[Any] = []
        for index, parcel in enumerate(parcels):
            post = group.recv if index < num_recvs else group.send
            try:
                works.append(post([torch.from_numpy(parcel.data)], parcel.peer, _TAG))
            except RuntimeError as error:
                raise self._lost(parcel.peer, error) from error
        if works:
            self._waiting.run(lambda: self._wait(parcels, works, deadline, timeout_s), timeout_s + _STUCK_S)

    def _wait(self, parcels: Sequence[Parcel], works: Sequence[Any], deadline: float, timeout_s: float) -> None:
        """Wait for all of it; on this transport's thread."""
        for index, work in enumerate(works):
            left = timedelta(seconds=deadline - time.monotonic())
            try:
                work.wait(max(left, timedelta(0)) + _OVERTIME)
            except RuntimeError as error:
                if time.monotonic() < deadline:
                    raise self._lost(parcels[index].peer, error) from error
                raise self._late(parcels[index:], works[index:], timeout_s) from error

    def close(self) -> None:
        with self._failing:
            self._failure = self._failure or "the gloo transport is closed"
            self._group = None
        self._waiting.close()

    def abort(self, reason: str) -> None:
        with self._failing:
            group, self._group = self._group, None
            self._failure = self._failure or reason
        if group is not None:
            unblock(group)  # before the caller goes on: from now on gloo touches no memory of its
        self._waiting.abandon(TransportError(self._failure))

    def _lost(self, peer: int, error: RuntimeError) -> TransportError:
        if self._failure is not None:
            return TransportError(self._failure)
        reason = str(error).splitlines()[0]
        return TransportError(f"rank {self.rank} lost rank {peer}: {reason}")

    def _late(self, parcels: Sequence[Parcel], works: Sequence[Any], timeout_s: float) -> TransportError:
        """The error at the deadline. gloo has closed all connections by now, so what is not done fails at once."""
        if self._failure is not None:
            return TransportError(self._failure)
        late = {parcels[0].peer}
        for parcel, work in zip(parcels[1:], works[1:], strict=True):
            try:
                work.wait(_SHORTEST_WAIT)
            except RuntimeError:
                late.add(parcel.peer)
        return PeerTimeoutError(f"rank {self.rank} waited {timeout_s:g} s for ranks {sorted(late)}")
