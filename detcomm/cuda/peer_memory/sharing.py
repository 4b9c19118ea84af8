# SPDX-License-Identifier: Apache-2.0
"""One piece of device memory on every rank of a block, mapped by all of them: what the ways to share it have in common.

In two rounds. First every rank has its own piece and tells a ticket, a text by which its peers find it. Then each maps
all others' pieces. What goes wrong is told in place of a ticket, and everybody reads everything, so all ranks of a
block come to the same end.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs

from detcomm.cuda.peer_memory.device_access import DeviceAccess
from detcomm.cuda.peer_memory.meeting import Meeting, decode, encode, errors_text
from detcomm.cuda.peer_memory.regions import table_bytes
from detcomm.cuda.peer_memory.retirement import retire
from detcomm.errors import DetcommError, TransportError

PAD_BYTES = 64 << 10
"""Of a signal pad: 8 KiB for each of eight ranks."""

_ALIGN_BYTES = 512
_NONCE_BYTES = 16
_left: list[Any] = []
"""What peers may have mapped when a rank gives up: kept until the end of the process."""


class Share(Protocol):
    """This rank's piece, and its mappings of the others'.

    Attributes:
        address: of its own piece; what lies there at first is undefined.
        outlives_its_owner: whether a peer may read the piece after ``free``, until the peer unmaps it.
    """

    address: int
    outlives_its_owner: bool

    def ticket(self) -> str:
        """What the peers need in order to map it."""

    def map(self, tickets: Sequence[str], meeting: Meeting, deadline: float) -> tuple[int, ...]:
        """Map the peers' pieces; all ranks of the block call this.

        Args:
            tickets: by index in the block.
            deadline: on the monotonic clock.

        Returns:
            Addresses by index, the own piece's among them.

        Raises:
            DetcommError: it does not work, and why.
        """

    def unmap(self) -> None:
        """Give up the mappings of the peers' pieces. Idempotent."""

    def free(self) -> None:
        """Give up the own piece. Idempotent."""


Provider = Callable[[int], Share]
"""Makes this rank's piece of so many bytes.

Raises:
    DetcommError: it cannot, and why.
"""


@attrs.frozen
class SharedPiece:
    """A share whose addresses are known and proved: each rank has read the others' nonces through its mappings."""

    share: Share
    pads: tuple[int, ...]
    staging: tuple[int, ...]
    staging_bytes: int


Enter = Callable[[tuple[int, ...], int], None]
"""Told where all staging areas are mapped here, and of own room for ``table_bytes``; before the ranks agree.

Raises:
    DetcommError: it does not work, and then no rank has the piece.
"""


def share_piece(
    provide: Provider, access: DeviceAccess, meeting: Meeting, staging_bytes: int, enter: Enter, deadline: float
) -> SharedPiece | str:
    """Make and map memory on all ranks of a block; or why it does not work, the same text on all of them.

    Raises:
        PeerTimeoutError, TransportError: ranks did not come, or the group has failed; own memory that peers may have
            mapped is left to the end of the process.
    """
    staging_bytes = -(-staging_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    table = PAD_BYTES + staging_bytes
    nonce = secrets.token_bytes(_NONCE_BYTES)
    share: Share | None = None
    try:
        share = provide(table + table_bytes(len(meeting.ranks)))
        access.zero(share.address, PAD_BYTES)
        access.write(share.address + PAD_BYTES, nonce)
        ticket = encode(error="", ticket=share.ticket(), nonce=nonce.hex())
    except DetcommError as error:
        ticket = encode(error=str(error), ticket="", nonce="")
    try:
        told = [decode(text) for text in meeting.exchange("share", ticket, deadline)]
        reason = errors_text(meeting.ranks, [fields["error"] for fields in told])
        addresses: tuple[int, ...] = ()
        if not reason:
            assert share is not None
            error_text = ""
            try:
                addresses = share.map([fields["ticket"] for fields in told], meeting, deadline)
                _prove(access, meeting, addresses, [bytes.fromhex(fields["nonce"]) for fields in told])
                enter(tuple(address + PAD_BYTES for address in addresses), share.address + table)
            except DetcommError as error:
                error_text = str(error)
            reason = meeting.agree("mapped", error_text, deadline)
        if reason:
            if share is not None:
                share.unmap()
            retire(meeting, _nothing if share is None else share.free)
            return reason
    except DetcommError:
        _left.append(share)
        raise
    assert share is not None
    return SharedPiece(share, addresses, tuple(address + PAD_BYTES for address in addresses), staging_bytes)


def _nothing() -> None:
    """A rank that could not make its piece has nothing to free."""


def _prove(access: DeviceAccess, meeting: Meeting, addresses: Sequence[int], nonces: Sequence[bytes]) -> None:
    """Read every rank's nonce through the mapping: a mapping that shows other memory would give wrong sums.

    Raises:
        TransportError: names the rank.
    """
    for rank, address, nonce in zip(meeting.ranks, addresses, nonces, strict=True):
        found = access.read(address + PAD_BYTES, _NONCE_BYTES)
        if found != nonce:
            raise TransportError(
                f"what is mapped as memory of rank {rank} is other memory: expected {nonce.hex()}, got {found.hex()}"
            )
