# SPDX-License-Identifier: Apache-2.0
"""Ranks of several hosts: one transport inside each host, another one between hosts, parcels routed by peer.

A step's parcels inside the host are exchanged first, then those between hosts. That cannot deadlock: both ends of a
message belong to the same step and the same of the two halves, so the earliest half that anybody is in has all its
ranks. Hierarchical schedules have steps of one kind alone, and lose nothing.
"""

import time
from collections.abc import Sequence

from detcomm.transports.base import Parcel, Transport


class HybridTransport(Transport):
    """Routes parcels to two transports, both owned.

    Args:
        local: over the ranks of this host; ``None`` if this rank is alone there. Its errors call them by group rank.
        local_ranks: the group ranks of this host, in the order of ``local``'s ranks.
        remote: over all ranks of the group.
    """

    name = "hybrid"

    def __init__(self, local: Transport | None, local_ranks: Sequence[int], remote: Transport) -> None:
        self.rank = remote.rank
        self.world_size = remote.world_size
        self._local = local
        self._local_ranks = tuple(local_ranks)
        self._remote = remote
        self._local_rank_of = {rank: index for index, rank in enumerate(local_ranks)} if local is not None else {}

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        local_sends, remote_sends = self._to_local(sends), self._to_remote(sends)
        local_recvs, remote_recvs = self._to_local(recvs), self._to_remote(recvs)
        if self._local is not None and (local_sends or local_recvs):
            self._local.exchange(local_sends, local_recvs, timeout_s)
        if remote_sends or remote_recvs:
            self._remote.exchange(remote_sends, remote_recvs, max(deadline - time.monotonic(), 0.0))

    def close(self) -> None:
        for transport in self._transports():
            transport.close()

    def abort(self, reason: str) -> None:
        for transport in self._transports():
            transport.abort(reason)

    def _transports(self) -> list[Transport]:
        return [self._remote] if self._local is None else [self._local, self._remote]

    def _to_local(self, parcels: Sequence[Parcel]) -> list[Parcel]:
        inside = self._local_rank_of
        return [Parcel(inside[parcel.peer], parcel.data) for parcel in parcels if parcel.peer in inside]

    def _to_remote(self, parcels: Sequence[Parcel]) -> list[Parcel]:
        return [parcel for parcel in parcels if parcel.peer not in self._local_rank_of]
