# SPDX-License-Identifier: Apache-2.0
"""Memory of this process that all ranks of its host can read where it lies: one sparse segment, first-fit allocation.

There is one heap a process, for all its groups; a group maps its peers' heaps when it is made. Freed pages go back to
the machine. Nothing here knows of tensors.
"""

import os
import threading
from bisect import insort

from detcomm.errors import UsageError
from detcomm.transports.memory_segment import PAGE_BYTES, OwnSegment


class SharedHeap:
    """Allocations in whole pages. Any thread may allocate and free.

    Args:
        num_bytes: all that can be allocated. Costs address space alone until it is used.
    """

    def __init__(self, num_bytes: int) -> None:
        self.segment = OwnSegment(num_bytes, "detcomm-heap")
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._gaps: list[tuple[int, int]] = [(0, num_bytes // PAGE_BYTES * PAGE_BYTES)]  # begin, end; ascending, apart

    def allocate(self, num_bytes: int) -> int:
        """The address of zeroed memory.

        Raises:
            UsageError: no gap is large enough.
        """
        size = max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES
        with self._lock:
            for index, (begin, end) in enumerate(self._gaps):
                if end - begin >= size:
                    self._gaps[index : index + 1] = [(begin + size, end)] if end - begin > size else []
                    return self.segment.mapping.address + begin
        raise UsageError(f"shared_empty: no room for {num_bytes} bytes in this process's shared memory")

    def free(self, address: int, num_bytes: int) -> None:
        """Give back what ``allocate(num_bytes)`` returned."""
        if os.getpid() != self.owner:
            return  # a forked child drops its copies of the parent's tensors; the memory is the parent's
        begin = address - self.segment.mapping.address
        end = begin + max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES
        self.segment.mapping.discard(begin, end - begin)
        with self._lock:
            insort(self._gaps, (begin, end))
            merged: list[tuple[int, int]] = []
            for gap in self._gaps:
                if merged and merged[-1][1] == gap[0]:
                    merged[-1] = (merged[-1][0], gap[1])
                else:
                    merged.append(gap)
            self._gaps = merged


_making = threading.Lock()
_heap: SharedHeap | None = None


def process_heap() -> SharedHeap:
    """This process's heap, as large as the machine's memory; made at the first call, and anew in a forked child.

    Raises:
        OSError: the address space is limited too tightly.
    """
    global _heap
    with _making:
        if _heap is None or _heap.owner != os.getpid():
            _heap = SharedHeap(os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES)
        return _heap
