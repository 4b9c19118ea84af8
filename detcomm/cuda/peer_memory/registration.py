# SPDX-License-Identifier: Apache-2.0
"""Memory that was there before: told to the peers, whichever functions of the driver made it, and mapped by them.

A rank tells for each part how it can be had, by a CUDA IPC handle or by a file descriptor. As many parts as each rank
has; they need not be alike on two ranks.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from detcomm.cuda.peer_memory import ipc
from detcomm.cuda.peer_memory.device_access import DeviceAccess
from detcomm.cuda.peer_memory.meeting import Meeting, decode, encode, errors_text
from detcomm.cuda.peer_memory.virtual import MOST_DESCRIPTORS, DescriptorOffer, DescriptorRequest, VirtualMapping
from detcomm.cuda.peer_memory.virtual import export_descriptor as export
from detcomm.errors import DetcommError, NativeError, TransportError

Part = tuple[int, int]
"""Beginning and bytes of a part of one allocation of the driver."""


class Mappings:
    """What of the peers' memory one registration has mapped here.

    Attributes:
        addresses: by index in the block and number of the part; own parts are not among them.
    """

    def __init__(self) -> None:
        self.addresses: dict[tuple[int, int], int] = {}
        self._closing: list[Callable[[], None]] = []

    def add(self, index: int, number: int, address: int, close: Callable[[], None]) -> None:
        """One more."""
        self.addresses[index, number] = address
        self._closing.append(close)

    def close(self) -> None:
        """Unmap all. Idempotent."""
        while self._closing:
            self._closing.pop()()


class Registration:
    """One rank's side of a registration; ``tell``, then ``map``, each by all ranks of the block.

    Args:
        device: whose kernels read the peers' memory, by its number in this process.
        parts: this rank's memory.
    """

    def __init__(self, access: DeviceAccess, device: int, meeting: Meeting, parts: Sequence[Part]) -> None:
        self._access = access
        self._device = device
        self._meeting = meeting
        self._parts = parts
        self._told: list[dict[str, Any]] = []
        self._offer = DescriptorOffer([], 0)
        self.num_parts = 0
        """Of the rank that has most of them."""

    def tell(self, deadline: float) -> str:
        """Tell the peers how to have each part; why it cannot be, the same text on all ranks, or nothing."""
        tickets = self._meeting.exchange("register", self._ticket(), deadline)
        self._told = [decode(ticket) for ticket in tickets]
        self.num_parts = max(len(fields["parts"]) for fields in self._told)
        return errors_text(self._meeting.ranks, [fields["error"] for fields in self._told])

    def map(self, mappings: Mappings, deadline: float) -> None:
        """Map the peers' parts.

        Raises:
            DetcommError: it does not work; what was mapped is in ``mappings`` all the same.
        """
        deadline = min(deadline, time.monotonic() + _PATIENCE_S)
        with contextlib.ExitStack() as stack:
            requests = {}
            for index, fields in enumerate(self._told):
                if index != self._meeting.index and fields["name"]:
                    requests[index] = DescriptorRequest(fields["name"])
                    stack.callback(requests[index].close)
            self._offer.serve(deadline)
            for index, fields in enumerate(self._told):
                if index == self._meeting.index:
                    continue
                descriptors = requests[index].fetch(deadline) if index in requests else []
                for descriptor in descriptors:
                    stack.callback(os.close, descriptor)
                self._map_peer(index, fields["parts"], descriptors, mappings)

    def close(self) -> None:
        """The peers have what they need. Idempotent."""
        self._offer.close()

    def _ticket(self) -> str:
        told: list[tuple[str, int, int]] = []
        descriptors: list[int] = []
        try:
            for start, num_bytes in self._parts:
                begin, allocated = self._access.allocation_of(start)
                if start + num_bytes > begin + allocated:
                    raise TransportError(f"{num_bytes} bytes that are not of one allocation of the driver{_HINT}")
                told.append((self._handle(begin, descriptors), start - begin, allocated))
            if len(descriptors) > MOST_DESCRIPTORS:
                raise TransportError(f"{len(descriptors)} allocations at once; expected at most {MOST_DESCRIPTORS}")
            self._offer = DescriptorOffer(descriptors, len(self._meeting.ranks) - 1)
        except (DetcommError, OSError) as error:
            for descriptor in descriptors:
                os.close(descriptor)
            return encode(error=str(error), parts=[], name="")
        return encode(error="", parts=told, name=self._offer.name)

    def _handle(self, begin: int, descriptors: list[int]) -> str:
        """A CUDA IPC handle; empty for the next of the descriptors."""
        try:
            return ipc.handle_of(self._access, begin)
        except NativeError as by_handle:
            try:
                descriptors.append(export(self._access, begin))
            except NativeError as by_descriptor:
                raise TransportError(f"{by_handle}; {by_descriptor}{_HINT}") from by_descriptor
            return ""

    def _map_peer(
        self, index: int, parts: list[tuple[str, int, int]], descriptors: list[int], mappings: Mappings
    ) -> None:
        next_descriptor = iter(descriptors)
        for number, (handle, offset, allocated) in enumerate(parts):
            if handle:
                address = ipc.open_handle(self._access, handle)
                mappings.add(index, number, address + offset, partial(ipc.close_handle, self._access, address))
            else:
                mapping = VirtualMapping(self._access, self._device, next(next_descriptor), allocated)
                mappings.add(index, number, mapping.address + offset, mapping.close)


_PATIENCE_S = 30.0
"""For peers that have just answered."""

_HINT = " (memory of torch's expandable segments cannot be shared)"
