# SPDX-License-Identifier: Apache-2.0
"""The transport seam: one verb, ``exchange``. A transport moves bytes and knows nothing of reductions.

A transport's channel is its own (a second gloo context, a duplicated MPI communicator), so that a user's messages
can never meet ours.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
"""A contiguous run of bytes: a one-dimensional ``uint8`` view of somebody's memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """Bytes for a peer, or room for bytes from one."""

    peer: int
    data: Bytes


class Transport(ABC):
    """Moves the bytes of one step between the ranks of one group.

    One thread at a time calls it. After a ``TransportError`` it is unusable.
    """

    name: str
    rank: int
    world_size: int

    @abstractmethod
    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], timeout_s: float) -> None:
        """Post everything together and return when all of it is done.

        Messages between a pair match in posting order and must have equal sizes. Empty parcels are legal. No
        parcel's peer is the rank itself.

        Raises:
            TransportError: a peer is lost; names it.
            PeerTimeoutError: not done within ``timeout_s``; names the peers waited for.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent; never waits for a peer."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Make a running ``exchange`` of another thread end with ``TransportError(reason)`` soon, and every later one."""
