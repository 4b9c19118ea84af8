# SPDX-License-Identifier: Apache-2.0
"""The ranks of one host over shared memory: whole collectives in one native call, and ``exchange`` for any plan.

How the ranks find each other's segments is ``shared_memory_rendezvous``'s business.
"""

import ctypes
from collections.abc import Sequence

from detcomm import native_shm
from detcomm.transports.base import Parcel, Transport
from detcomm.transports.shared_collectives import SharedCollectives
from detcomm.transports.shared_group import SharedGroup


class SharedMemoryTransport(Transport):
    """One rank of a group over shared memory.

    Args:
        group: owned from now on.
    """

    name = "shared_memory"

    def __init__(self, group: SharedGroup) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self._group = group
        self.native_collectives = SharedCollectives(group)

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], timeout_s: float) -> None:
        status = self._group.exchange(_native_parcels(sends), _native_parcels(recvs), timeout_s)
        if status != native_shm.OK:
            raise self._group.failure(status, timeout_s)

    def close(self) -> None:
        self._group.close()

    def abort(self, reason: str) -> None:
        self._group.abort(reason)


def _native_parcels(parcels: Sequence[Parcel]) -> ctypes.Array[native_shm.NativeParcel]:
    array = (native_shm.NativeParcel * len(parcels))()
    for structure, parcel in zip(array, parcels, strict=True):
        structure.peer = parcel.peer
        structure.data = parcel.data.__array_interface__["data"][0]
        structure.num_bytes = parcel.data.size
    return array
