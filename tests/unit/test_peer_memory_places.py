# SPDX-License-Identifier: Apache-2.0
"""Where memory lies for peers, and the keys of torch's rendezvous, whatever came before in a process."""

import threading
import time
from typing import Any

import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from detcomm.cuda.peer_memory import symmetric
from detcomm.cuda.peer_memory.meeting import Meeting, errors_text
from detcomm.cuda.peer_memory.regions import Place, Regions, Span


class _NoDevice:
    def write(self, address: int, content: bytes) -> None:
        pass


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=8),
    st.integers(0, 900),
    st.integers(1, 60),
    st.randoms(),
)
def test_find_is_what_a_search_through_all_spans_finds(
    parts: list[tuple[int, int]], address: int, num_bytes: int, order: Any
) -> None:
    spans, start = [], 0
    for region, (gap, size) in enumerate(parts):
        spans.append(Span(start + gap, start + gap + size, region))
        start += gap + size
    device: Any = _NoDevice()
    regions = Regions(device, 0, 1)
    shuffled = spans[:]
    order.shuffle(shuffled)
    for span in shuffled:
        regions.own((span,))
    holding = [span for span in spans if span.start <= address and address + num_bytes <= span.stop]
    expected = Place(holding[0].region, address - holding[0].start) if holding else None
    assert regions.find(address, num_bytes) == expected
    assert regions.generation == len(spans)


def test_equal_errors_are_told_once() -> None:
    assert errors_text([4, 5, 6], ["", "no", "no"]) == "ranks 5, 6: no"
    assert errors_text([4, 5], ["", ""]) == ""


def test_ranks_of_unlike_numbers_of_rendezvous_find_each_other() -> None:
    """Torch numbers its keys by process. Here one rank has had three more than the other."""
    store = dist.HashStore()
    met: dict[int, list[bytes]] = {}

    def meet(rank: int, first: int) -> None:
        meeting = Meeting(store, "g", [range(2)], rank, lambda: None)
        own = symmetric._Renumbered(meeting, time.monotonic() + 60.0)
        told = []
        for number in (first, first + 1):
            own.set(f"CUDASymmetricMemory/{number}/{rank}", f"{rank} in {number - first}")
            told += [own.get(f"CUDASymmetricMemory/{number}/{peer}") for peer in range(2)]
        met[rank] = told

    threads = [threading.Thread(target=meet, args=arguments) for arguments in ((0, 7), (1, 10))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met[0] == met[1] == [b"0 in 0", b"1 in 0", b"0 in 1", b"1 in 1"]
