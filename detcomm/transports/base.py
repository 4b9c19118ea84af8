# SPDX-License-Identifier: Apache-2.0
"""The transport seam: one verb, ``exchange``. A transport moves bytes and knows nothing of reductions.

A transport's channel is its own (a second gloo context, a duplicated MPI communicator), so that a user's messages
can never meet ours.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from detcomm.association import Association
from detcomm.call import Call
from detcomm.collectives import Accumulate

Bytes = NDArray[np.uint8]
"""A contiguous run of bytes: a one-dimensional ``uint8`` view of somebody's memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """Bytes for a peer, or room for bytes from one."""

    peer: int
    data: Bytes


class PreparedCall(Protocol):
    """A call in a native library's form, to be run again and again.

    Attributes:
        in_place_offset: bytes from the input to the output where both lie in the same memory element by element.
    """

    in_place_offset: int


class NativeCollectives(Protocol):
    """Whole collectives in one native call, offered by a transport whose ranks can read each other's memory.

    It keeps the same contract as a plan over ``exchange``, bit for bit, and does the agreement between the ranks
    itself: a digest of the call rides on its first message.
    """

    def run(
        self,
        call: Call,
        association: Association,
        accumulate: Accumulate,
        input: Bytes,
        output: Bytes,
        *,
        factor: float | None = None,
        label: str = "",
        timeout_s: float,
    ) -> None:
        """Do ``call``; ``output`` may be ``input``, or this rank's shard of it where the collective has shards.

        ``factor`` is for PREMUL_SUM alone and may differ between the ranks; ``label`` is for error texts.

        Raises:
            MismatchError: on every rank alike, naming the ranks and both calls; nothing is written and the group
                stays usable.
            TransportError: a peer is lost; names it.
            PeerTimeoutError: a peer did not come within ``timeout_s``; names it.
        """

    def prepare(self, call: Call, association: Association, accumulate: Accumulate, label: str) -> PreparedCall:
        """``call`` to be run by ``run_prepared``."""

    def run_prepared(self, prepared: Any, source: int, target: int, timeout_s: float) -> None:
        """Do a prepared call, any but a PREMUL_SUM, on memory given by its addresses.

        The memory fits the call, and is apart or as ``in_place_offset`` says.

        Raises:
            MismatchError, TransportError, PeerTimeoutError: as ``run``, on all ranks, however each has called.
        """

    def agree(self, text: str, timeout_s: float, remainder: int | None = None) -> int:
        """Return when every rank has called with an equal text; otherwise ``MismatchError`` on every rank.

        The sum of the ranks' remainders modulo 2^64, which all of them give where one does.
        """


class Transport(ABC):
    """Moves the bytes of one step between the ranks of one group.

    One thread at a time calls it. After a ``TransportError`` it is unusable.
    """

    name: str
    rank: int
    world_size: int
    native_collectives: NativeCollectives | None = None

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
        """End a running ``exchange`` of another thread with ``TransportError(reason)`` soon, and every later one.

        Peers that wait for this rank see a lost peer, as far as the medium can tell them.
        """
