# SPDX-License-Identifier: Apache-2.0
"""The memory of one case: the same for all contenders, on the host or on a GPU.

Two runs of bytes, one to send from and one to receive into, as nccl-tests have them; in place uses the second alone.
"""

import torch

from detcomm.bench.cases import Case, Place
from detcomm.collectives import Collective
from detcomm.transports.base import Bytes


class Buffers:
    """Memory for one case on one rank, touched, so that no page is mapped during the measurement."""

    def __init__(self, case: Case, rank: int, world_size: int, device: torch.device) -> None:
        itemsize = case.dtype.itemsize
        given, received = (number * itemsize for number in (case.given(world_size), case.received(world_size)))
        self._send = torch.zeros(given, dtype=torch.uint8, device=device)
        self._receive = torch.zeros(max(given, received), dtype=torch.uint8, device=device)
        own = slice(rank * min(given, received), (rank + 1) * min(given, received))
        whole = slice(0, max(given, received))
        self._slots = {
            (Place.OUT, "given"): (self._send, slice(0, given)),
            (Place.OUT, "received"): (self._receive, slice(0, received)),
            (Place.IN, "given"): (self._receive, own if case.collective is Collective.ALL_GATHER else whole),
            (Place.IN, "received"): (self._receive, own if case.collective is Collective.REDUCE_SCATTER else whole),
        }

    def given(self, place: Place) -> torch.Tensor:
        """This rank's contribution, as bytes."""
        memory, part = self._slots[place, "given"]
        return memory[part]

    def received(self, place: Place) -> torch.Tensor:
        """Where this rank's result goes, as bytes."""
        memory, part = self._slots[place, "received"]
        return memory[part]

    def fill(self, place: Place, data: Bytes) -> None:
        """Put a contribution in its place; what is to be received is overwritten with ones first."""
        self._receive.fill_(1)
        self.given(place).copy_(torch.from_numpy(data.copy()))

    def clear(self) -> None:
        """Zeros everywhere, which stay finite however often they are added."""
        self._send.zero_()
        self._receive.zero_()

    def result(self, place: Place) -> Bytes:
        """A copy of what was received."""
        data: Bytes = self.received(place).cpu().numpy().copy()
        return data
