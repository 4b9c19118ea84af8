# SPDX-License-Identifier: Apache-2.0
"""Device memory shared by torch's symmetric memory: its allocation, and its rendezvous over a store of ours.

Second choice to CUDA IPC, since its rendezvous (torch 2.11) has four habits that a group of ours must not take over:

- It passes file descriptors from rank to rank and waits for them without an end, holding Python's lock: a peer that
  dies in that moment stops the whole process. So all ranks meet just before.
- Its keys in the store are numbered by process, not by group; ranks that are in unlike numbers of groups wait for
  different keys. So the store given to it counts anew.
- It makes an NVLink multicast object where the devices can. So it is refused there, unless torch's variable says no.
- One rendezvous at a time in a process, by the name of its socket.

Freed memory stays until the last peer has unmapped it.
"""

import os
import re
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from detcomm.cuda.peer_memory.meeting import Meeting
from detcomm.errors import TransportError
from detcomm.polling_store import PollingStore

_symmetric: Any = getattr(torch._C._distributed_c10d, "_SymmetricMemory", None)
_c10d: Any = torch._C._distributed_c10d


class SymmetricShare:
    """An own allocation, and the peers'.

    Raises:
        TransportError: torch has no symmetric memory here, or one that would do what ours must not.
    """

    outlives_its_owner = True
    _rendezvous: ClassVar[threading.Lock] = threading.Lock()
    _num_made: ClassVar[int] = 0

    def __init__(self, device: int, num_bytes: int) -> None:
        where = torch.device("cuda", device)
        _refuse_where_it_would_harm(where)
        try:
            self._tensor: Any = _symmetric.empty_strided_p2p((num_bytes,), (1,), torch.uint8, where)
        except RuntimeError as error:
            raise TransportError(f"torch's symmetric memory: {_first_line(error)}") from error
        self._handle: Any = None
        self.address: int = self._tensor.data_ptr()

    def ticket(self) -> str:
        return str(self._tensor.device.index)

    def map(self, tickets: Sequence[str], meeting: Meeting, deadline: float) -> tuple[int, ...]:
        if len(set(tickets)) < len(tickets) and not _allows_overlapping_devices():
            raise TransportError(
                "torch's symmetric memory refuses several ranks with a device of one number "
                "(TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 allows them)"
            )
        with SymmetricShare._rendezvous:
            SymmetricShare._num_made += 1
            name = f"detcomm/{meeting.name}/{SymmetricShare._num_made}"
            meeting.exchange("rendezvous", "", deadline)
            store = _Renumbered(meeting, deadline)
            group = dist.ProcessGroup(store, meeting.index, len(meeting.ranks))
            _c10d._register_process_group(name, group)
            try:
                self._handle = _symmetric.rendezvous(self._tensor, name)
            except RuntimeError as error:
                raise TransportError(f"torch's symmetric memory: {_first_line(error)}") from error
            finally:
                _c10d._unregister_process_group(name)
        return tuple(self._handle.buffer_ptrs)

    def unmap(self) -> None:
        """Torch unmaps all together, with the own allocation: see ``free``."""

    def free(self) -> None:
        self._handle = None
        self._tensor = None


class _Renumbered(PollingStore):
    """The keys of one rendezvous, by the order in which they come, whatever number torch gives them in this process."""

    def __init__(self, meeting: Meeting, deadline: float) -> None:
        super().__init__(meeting.store, max(deadline - time.monotonic(), 0.0), meeting.has_failed)
        self._space = f"symmetric/{meeting.number}/{meeting.num_rounds}"
        self._numbers: dict[str, int] = {}

    def set(self, key: str, value: Any) -> None:
        super().set(self._key(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._key(key))

    def check(self, keys: Sequence[str]) -> bool:
        return super().check([self._key(key) for key in keys])

    def add(self, key: str, amount: int) -> int:
        return super().add(self._key(key), amount)

    def _key(self, key: str) -> str:
        number = re.search(r"\d+", key)
        if number is None:
            return f"{self._space}/{key}"
        ordinal = self._numbers.setdefault(number[0], len(self._numbers))
        return f"{self._space}/{key[: number.start()]}{ordinal}{key[number.end() :]}"


def _refuse_where_it_would_harm(device: torch.device) -> None:
    if _symmetric is None or not hasattr(_symmetric, "get_backend"):
        raise TransportError("this torch has no symmetric memory")
    backend = _symmetric.get_backend(device)
    if backend != "CUDA":
        raise TransportError(f"torch's symmetric memory: expected the backend CUDA, got {backend}")
    kind: Any = torch._C._autograd.DeviceType.CUDA
    if _symmetric.has_multicast_support(kind, device.index) and not _allows_overlapping_devices():
        raise TransportError(
            "torch's symmetric memory would make an NVLink multicast object, which is not wanted here "
            "(TORCH_SYMM_MEM_DISABLE_MULTICAST=1 keeps it from it)"
        )


def _allows_overlapping_devices() -> bool:
    return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
