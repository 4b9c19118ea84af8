# SPDX-License-Identifier: Apache-2.0
"""All ranks agree on a call before it starts: one header to everybody, compared before any output is written.

Every rank sees the headers of all ranks, so all come to the same verdict and raise the same text, and the group
stays in step and usable. Knows headers and a transport; neither plans nor folds.
"""

from collections.abc import Sequence

import numpy as np

from detcomm.errors import MismatchError, TransportError
from detcomm.header import HEADER_BYTES, Header, describe_difference, ranks_text, with_sequence
from detcomm.transports.base import Bytes, Parcel, Transport


class Agreement:
    """Compares the headers of one group's ranks, in buffers made once."""

    def __init__(self, transport: Transport, group_name: str) -> None:
        self._transport = transport
        self._group_name = group_name
        self._received = np.zeros((transport.world_size, HEADER_BYTES), dtype=np.uint8)
        self._own: Bytes = np.zeros(HEADER_BYTES, dtype=np.uint8)
        self._peers = [rank for rank in range(transport.world_size) if rank != transport.rank]
        self._sends = [Parcel(peer, self._own) for peer in self._peers]
        self._recvs = [Parcel(peer, self._received[peer]) for peer in self._peers]

    def agree(self, sequence: int, header: bytes, texts: Sequence[str], timeout_s: float) -> None:
        """Exchange headers; return if all are equal.

        Args:
            sequence: the number of the collective in its group.
            header: this rank's, encoded; the sequence number is filled in here.
            texts: the texts of this rank's calls, which are exchanged only to name the first difference between
                coalesced calls.
            timeout_s: for each of at most two exchanges.

        Raises:
            MismatchError: the same text on every rank.
            TransportError: a peer is lost or late.
        """
        own = with_sequence(header, sequence)
        self._own[:] = np.frombuffer(own, dtype=np.uint8)
        self._received[self._transport.rank] = self._own
        self._exchange(self._sends, self._recvs, timeout_s)
        if self._received.tobytes() == own * self._transport.world_size:
            return
        encoded = [row.tobytes() for row in self._received]
        reason = describe_difference(encoded)
        headers = [Header.decode(data) for data in encoded]
        known = [decoded for decoded in headers if decoded is not None]
        sequence = min((decoded.sequence for decoded in known), default=sequence)  # one text on all ranks
        # All ranks hold the same headers, so all of them take the second exchange or none does.
        if len(known) == len(headers) and any(decoded.num_calls > 1 for decoded in known):
            sizes = [decoded.texts_bytes for decoded in known]
            blocks = self._exchange_texts("\n".join(texts), sizes, timeout_s)
            reason = first_difference(blocks) or reason
        raise MismatchError(f"collective #{sequence} of group {self._group_name}: {reason}")

    def _exchange_texts(self, own: str, sizes: Sequence[int], timeout_s: float) -> list[list[str]]:
        data = np.frombuffer(bytearray(own.encode()), dtype=np.uint8)
        rooms: list[Bytes] = [np.empty(size, dtype=np.uint8) for size in sizes]
        rooms[self._transport.rank] = data
        sends = [Parcel(peer, data) for peer in self._peers]
        recvs = [Parcel(peer, rooms[peer]) for peer in self._peers]
        self._exchange(sends, recvs, timeout_s)
        return [room.tobytes().decode(errors="replace").split("\n") for room in rooms]

    def _exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], timeout_s: float) -> None:
        try:
            self._transport.exchange(sends, recvs, timeout_s)
        except TransportError as error:
            raise type(error)(f"agreement of the ranks: {error}") from error


def first_difference(blocks: Sequence[Sequence[str]]) -> str | None:
    """The first call, counted from 1, in which blocks of calls (one block a rank) differ, and who says what."""
    for index in range(max(map(len, blocks))):
        said: dict[str, list[int]] = {}
        for rank, block in enumerate(blocks):
            said.setdefault(block[index] if index < len(block) else "no further call", []).append(rank)
        if len(said) > 1:
            verdicts = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in said.items())
            return f"the ranks disagree on call {index + 1} of a coalesced block: {verdicts}"
    return None
