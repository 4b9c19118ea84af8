# SPDX-License-Identifier: Apache-2.0
"""Which memory of this rank its peers have mapped, under which number, and where theirs lies here.

Each rank numbers its own regions; nothing need be alike on two ranks. A sender says in which region, and where in it,
its operand lies; a reader looks up where it has mapped that region of that sender, in a table in device memory. So a
tensor may be symmetric on one rank and not on another, and no rank assumes anything of its peers.
"""

import struct
from bisect import bisect_right
from typing import NamedTuple

from detcomm.cuda.peer_memory.device_access import DeviceAccess

MAX_REGIONS = 4096
"""Of one rank; what the table has room for. Each captured graph takes one, and a training loop may have hundreds."""


class Place(NamedTuple):
    """Bytes of this rank as its peers find them."""

    region: int
    offset: int


class Span(NamedTuple):
    """Memory of this rank that is a region."""

    start: int
    stop: int
    region: int


class Regions:
    """The regions of the ranks of one block.

    Attributes:
        table: the address on the device of ``uint64[num_ranks][MAX_REGIONS]``: where this process has mapped the
            region of each rank, by index in the block; 0 where there is none.
        generation: grows with every change; for those who remember what ``find`` said.

    Args:
        access: writes the table.
        table: ``table_bytes(num_ranks)`` of device memory.
    """

    def __init__(self, access: DeviceAccess, table: int, num_ranks: int) -> None:
        self._access = access
        self.table = table
        self.generation = 0
        self._bases = [[0] * MAX_REGIONS for _ in range(num_ranks)]
        self._own: tuple[list[int], list[Span]] = (
            [],
            [],
        )  # starts and spans, replaced together: another thread may look
        access.write(table, bytes(table_bytes(num_ranks)))

    def find(self, address: int, num_bytes: int) -> Place | None:
        """Where bytes of this rank lie for its peers; ``None`` if they have not mapped all of them."""
        starts, spans = self._own
        index = bisect_right(starts, address) - 1
        if index < 0 or address + num_bytes > spans[index].stop:
            return None
        return Place(spans[index].region, address - spans[index].start)

    def bases(self, region: int) -> tuple[int, ...]:
        """Where each rank's region of this number is mapped here, by index; 0 where there is none."""
        return tuple(bases[region] for bases in self._bases)

    def map(self, bases: dict[tuple[int, int], int]) -> None:
        """Enter where regions of ranks are mapped here, by (index, region); before any rank may say that it uses them.

        Args:
            bases: 0 takes one out again.
        """
        for (index, region), address in bases.items():
            self._bases[index][region] = address
            self._access.write(self.table + 8 * (MAX_REGIONS * index + region), struct.pack("Q", address))

    def map_region(self, region: int, bases: tuple[int, ...], _: int = 0) -> None:
        """The same of one region of all ranks, by index."""
        self.map({(index, region): address for index, address in enumerate(bases)})

    def own(self, spans: tuple[Span, ...]) -> None:
        """Let ``find`` know of memory of this rank, once all its peers have mapped it."""
        self._replace([*self._own[1], *spans])

    def disown(self, regions: set[int]) -> None:
        """Take regions of this rank out again."""
        self._replace([span for span in self._own[1] if span.region not in regions])

    def _replace(self, spans: list[Span]) -> None:
        spans.sort()
        self._own = ([span.start for span in spans], spans)
        self.generation += 1


def table_bytes(num_ranks: int) -> int:
    """Of the table in device memory."""
    return 8 * MAX_REGIONS * num_ranks
