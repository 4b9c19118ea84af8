# SPDX-License-Identifier: Apache-2.0
"""All ranks agree on a call before it starts: headers are compared before any output is written.

In a small group everybody sends its header to everybody, in one exchange. In a large one that would be too many
messages, so headers go round as in a dissemination barrier (Hensgen, Finkel, Manber 1988): in round k every rank sends
to the rank 2^k further, and with its header whether all that it has seen so far were equal. After ceil(log2 N)
rounds every rank has heard of all others, and all know the same: equal or not.

Only if the headers differ does everybody need all of them. Every rank then sees the headers of all ranks, so all come
to the same verdict and raise the same text, and the group stays in step and usable. Knows headers and a transport;
neither plans nor folds.
"""

import time
from collections.abc import Sequence

import numpy as np

from detcomm.errors import MismatchError, TransportError
from detcomm.header import HEADER_BYTES, Header, describe_difference, ranks_text, with_sequence
from detcomm.transports.base import Bytes, Parcel, Transport

DIRECT_WORLD_SIZE = 16
"""Up to so many ranks one exchange with everybody is quicker than several rounds."""

_EQUAL, _DIFFERENT = 1, 0
_REMAINDER_BYTES = 8


class Agreement:
    """Compares the headers of one group's ranks, in buffers made once."""

    def __init__(self, transport: Transport, group_name: str) -> None:
        rank, world_size = transport.rank, transport.world_size
        self._transport = transport
        self._group_name = group_name
        self._own: Bytes = np.zeros(HEADER_BYTES + _REMAINDER_BYTES, dtype=np.uint8)
        self._received = np.zeros((world_size, HEADER_BYTES + _REMAINDER_BYTES), dtype=np.uint8)
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._sends = [Parcel(peer, self._own) for peer in self._peers]
        self._recvs = [Parcel(peer, self._received[peer]) for peer in self._peers]
        # For the rounds: a header, and one byte for what has been seen so far.
        self._told: Bytes = np.zeros(HEADER_BYTES + 1, dtype=np.uint8)
        self._heard: Bytes = np.zeros(HEADER_BYTES + 1, dtype=np.uint8)
        distances = [1 << k for k in range((world_size - 1).bit_length())]
        self._rounds = [
            (Parcel((rank + distance) % world_size, self._told), Parcel((rank - distance) % world_size, self._heard))
            for distance in distances
        ]

    def agree(
        self, sequence: int, header: bytes, texts: Sequence[str], timeout_s: float, remainder: int = 0
    ) -> int | None:
        """Compare headers; return if all are equal.

        Args:
            sequence: the number of the collective in its group.
            header: this rank's, encoded; the sequence number is filled in here.
            texts: the texts of this rank's calls, which are exchanged only to name the first difference between
                coalesced calls.
            timeout_s: for all of it.
            remainder: a number modulo 2^64 that rides on the header, and may differ between the ranks.

        Returns:
            The sum of all ranks' remainders; ``None`` in a large group, whose ranks do not see all headers.

        Raises:
            MismatchError: the same text on every rank.
            TransportError: a peer is lost or late.
        """
        deadline = time.monotonic() + timeout_s
        own = with_sequence(header, sequence)
        if self._transport.world_size > DIRECT_WORLD_SIZE and self._disseminate(own, deadline):
            return None
        encoded, total = self._gather_headers(own, remainder, deadline)
        if encoded.count(own) == len(encoded):
            return total
        reason = describe_difference(encoded)
        headers = [Header.decode(data) for data in encoded]
        known = [decoded for decoded in headers if decoded is not None]
        sequence = min((decoded.sequence for decoded in known), default=sequence)  # one text on all ranks
        # All ranks hold the same headers, so all of them take this exchange or none does.
        if len(known) == len(headers) and any(decoded.num_calls > 1 for decoded in known):
            sizes = [decoded.texts_bytes for decoded in known]
            blocks = self._gather_texts("\n".join(texts), sizes, deadline)
            reason = first_difference(blocks) or reason
        raise MismatchError(f"collective #{sequence} of group {self._group_name}: {reason}")

    def _disseminate(self, own: bytes, deadline: float) -> bool:
        """Whether the headers of all ranks are equal; the same answer on every rank."""
        expected = own + bytes([_EQUAL])
        self._told[:] = np.frombuffer(expected, dtype=np.uint8)
        for send, recv in self._rounds:
            self._exchange([send], [recv], deadline)
            if self._heard.tobytes() != expected:
                self._told[HEADER_BYTES] = _DIFFERENT
        return bool(self._told[HEADER_BYTES] == _EQUAL)

    def _gather_headers(self, own: bytes, remainder: int, deadline: float) -> tuple[list[bytes], int]:
        """The header of every rank, and the sum of what rode on them."""
        self._own[:HEADER_BYTES] = np.frombuffer(own, dtype=np.uint8)
        self._own[HEADER_BYTES:] = np.array([remainder], dtype=np.uint64).view(np.uint8)
        self._received[self._transport.rank] = self._own
        self._exchange(self._sends, self._recvs, deadline)
        total = int(np.ascontiguousarray(self._received[:, HEADER_BYTES:]).view(np.uint64).sum())
        return [row[:HEADER_BYTES].tobytes() for row in self._received], total

    def _gather_texts(self, own: str, sizes: Sequence[int], deadline: float) -> list[list[str]]:
        """The texts of every rank's calls."""
        data = np.frombuffer(bytearray(own.encode()), dtype=np.uint8)
        rooms: list[Bytes] = [np.empty(size, dtype=np.uint8) for size in sizes]
        rooms[self._transport.rank] = data
        sends = [Parcel(peer, data) for peer in self._peers]
        recvs = [Parcel(peer, rooms[peer]) for peer in self._peers]
        self._exchange(sends, recvs, deadline)
        return [room.tobytes().decode(errors="replace").split("\n") for room in rooms]

    def _exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], deadline: float) -> None:
        try:
            self._transport.exchange(sends, recvs, max(deadline - time.monotonic(), 0.0))
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
