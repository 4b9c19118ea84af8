# SPDX-License-Identifier: Apache-2.0
"""Memory of the user that the ranks of a block map from each other: found, refused by all, taken back."""

import ctypes
import struct
import threading
import weakref
from typing import Any

import pytest

from detcomm.cuda.peer_memory.memory import PeerMemory
from detcomm.cuda.peer_memory.regions import MAX_REGIONS, Place
from detcomm.cuda.peer_memory.retirement import reclaim
from tests.fake_device_memory import num_descriptors
from tests.peer_ranks import TIMEOUT_S, PeerRanks


def _table(memory: PeerMemory) -> list[tuple[int, ...]]:
    """By index, as kernels see it."""
    size = 8 * MAX_REGIONS
    return [
        struct.unpack(f"{MAX_REGIONS}Q", ctypes.string_at(memory.regions.table + index * size, size))
        for index in range(len(memory.ranks))
    ]


def _allocate(ranks: PeerRanks, rank: int, num_bytes: int) -> int:
    address = ctypes.c_void_p()
    ranks.gpus[rank].call("cuMemAlloc_v2", ctypes.byref(address), num_bytes)
    assert address.value is not None
    ctypes.memset(address.value, 200 + rank, num_bytes)
    return address.value


def test_registered_memory_is_found_and_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many regions as each rank likes; a tensor may be symmetric on one rank alone."""
    ranks = PeerRanks(3, monkeypatch)
    memories = ranks.memories()
    whole = [_allocate(ranks, rank, 8192) for rank in range(3)]
    given: list[Any] = [[(whole[0], 8192)], [], [(whole[2] + 4096, 1000), (whole[2], 4096)]]
    found = [memory.regions.find(whole[rank], 8) for rank, memory in enumerate(memories)]
    assert found == [None] * 3
    before = memories[0].regions.generation
    assert ranks.on_each(lambda rank: memories[rank].register(given[rank], "kept", 60.0)) == [""] * 3
    assert memories[0].regions.generation > before
    assert memories[0].regions.find(whole[0] + 100, 8092) == Place(1, 100)
    assert memories[0].regions.find(whole[0] + 100, 8093) is None
    assert memories[1].regions.find(whole[1], 1) is None
    assert memories[2].regions.find(whole[2] + 4096, 1000) == Place(1, 0)
    assert memories[2].regions.find(whole[2] + 7, 10) == Place(2, 7)
    for index, memory in enumerate(memories):
        table = _table(memory)
        assert tuple(row[0] for row in table) == memory.segment.staging
        assert memory.regions.bases(1) == tuple(row[1] for row in table)
        for peer, region, content in ((0, 1, 200), (2, 1, 202), (2, 2, 202)):
            assert (table[peer][region] == 0) == (peer == index)
            if peer != index:
                assert ctypes.string_at(table[peer][region], 1000) == bytes([content]) * 1000
        assert table[1][1] == 0
    assert ranks.on_each(lambda rank: memories[rank].register([], "kept", 60.0)) == [""] * 3
    later = ranks.on_each(lambda rank: memories[rank].add_segment(64, 60.0))
    assert [segment.region for segment in later] == [3] * 3
    assert memories[1].regions.find(later[1].staging[1] + 8, 56) == Place(3, 8)
    assert ranks.on_each(lambda rank: memories[rank].close(TIMEOUT_S)) == [True] * 3
    assert not ranks.node.openings


@pytest.mark.parametrize("function", ["cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2"])
def test_what_one_rank_cannot_register_nobody_does(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(3, monkeypatch)
    memories = ranks.memories()
    whole = [_allocate(ranks, rank, 4096) for rank in range(3)]
    ranks.gpus[1].fails[function] = 1
    num_openings = len(ranks.node.openings)
    reasons = ranks.on_each(lambda rank: memories[rank].register([(whole[rank], 4096)], None, 60.0))
    assert len(set(reasons)) == 1
    assert f"rank 1: CUDA driver: {function} failed" in reasons[0]
    assert len(ranks.node.openings) == num_openings
    assert [memory.regions.find(whole[rank], 1) for rank, memory in enumerate(memories)] == [None] * 3
    ranks.gpus[1].fails.clear()
    assert ranks.on_each(lambda rank: memories[rank].register([(whole[rank], 4096)], None, 60.0)) == [""] * 3
    assert [memory.regions.find(whole[rank], 1) for rank, memory in enumerate(memories)] == [Place(1, 0)] * 3
    assert ranks.on_each(lambda rank: memories[rank].close(TIMEOUT_S)) == [True] * 3


def test_too_many_regions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(2, monkeypatch)
    memories = ranks.memories()
    whole = _allocate(ranks, 0, 4096)
    parts = [(whole, 16)] * MAX_REGIONS
    reasons = ranks.on_each(lambda rank: memories[rank].register(parts if rank == 0 else [], None, 60.0))
    assert reasons == [f"{MAX_REGIONS} parts of memory; there is room for {MAX_REGIONS - 1} more in a group"] * 2
    assert ranks.on_each(lambda rank: memories[rank].close(TIMEOUT_S)) == [True, True]


def test_memory_of_no_allocation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(2, monkeypatch)
    memories = ranks.memories()
    whole = _allocate(ranks, 0, 4096)
    reasons = ranks.on_each(lambda rank: memories[rank].register([(whole, 5000)], None, 60.0))
    assert len(set(reasons)) == 1
    assert "5000 bytes that are not of one allocation" in reasons[0]


def test_what_is_registered_can_be_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its numbers serve again."""
    ranks = PeerRanks(3, monkeypatch)
    memories = ranks.memories()
    whole = [_allocate(ranks, rank, 4096) for rank in range(3)]
    num_openings = len(ranks.node.openings)
    keys = [object(), object()]
    for _ in range(4):
        parts: list[list[tuple[int, int]]] = [[(whole[rank], 4096)] * 50 * rank for rank in range(3)]
        assert ranks.on_each(lambda rank, of=parts: memories[rank].register(of[rank], keys[0], 60.0)) == [""] * 3
        assert memories[2].regions.find(whole[2], 4096) is not None
        ranks.on_each(lambda rank: memories[rank].deregister(keys[1], 60.0))
        assert memories[2].regions.find(whole[2], 4096) is not None, "another's"
        ranks.on_each(lambda rank: memories[rank].deregister(keys[0], 60.0))
        assert memories[2].regions.find(whole[2], 4096) is None
        assert len(ranks.node.openings) == num_openings
    assert ranks.on_each(lambda rank: memories[rank].close(TIMEOUT_S)) == [True] * 3
    assert ranks.node.violations == []


class _Pool:
    """Keeps memory."""


def test_what_is_taken_back_is_kept_until_the_peers_have_unmapped_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer whose driver waits for a kernel may be late, and nobody waits for it for long."""
    ranks = PeerRanks(2, monkeypatch)
    memories = ranks.memories()
    pools = [_Pool(), _Pool()]
    whole = [_allocate(ranks, rank, 4096) for rank in range(2)]
    assert ranks.on_each(lambda rank: memories[rank].register([(whole[rank], 4096)], pools[rank], 60.0)) == ["", ""]
    ranks.gpus[1].gates["cuIpcCloseMemHandle"] = is_done = threading.Event()

    def deregister(rank: int) -> bool:
        memories[rank].deregister(pools[rank], 60.0, patience_s=0.05)
        return memories[rank].regions.find(whole[rank], 1) is None

    late = threading.Thread(target=ranks.on_each, args=(deregister, [1]))
    late.start()
    assert ranks.on_each(deregister, [0]) == [True]
    kept = weakref.ref(pools[0])
    pools[0] = _Pool()
    assert kept() is not None
    is_done.set()
    late.join()
    ranks.on_each(lambda rank: reclaim(), [0])
    assert kept() is None
    assert ranks.on_each(lambda rank: memories[rank].close(TIMEOUT_S)) == [True] * 2


@pytest.mark.parametrize("refused", ["", "cuMemExportToShareableHandle", "cuMemMap"])
def test_memory_without_a_handle_is_shared_by_descriptors(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's symmetric memory and NCCL's allocations are; one rank may have either kind, or nothing."""
    ranks = PeerRanks(3, monkeypatch)
    memories = ranks.memories()
    whole = [_allocate(ranks, rank, 4096) for rank in range(3)]
    for address in (whole[0], whole[2]):
        ranks.node.allocations[address].is_virtual = True
    before = num_descriptors("memfd:fake")
    if refused:
        ranks.gpus[2].fails[refused] = 801
    more = _allocate(ranks, 2, 4096)
    parts: list[Any] = [[(whole[0] + 1024, 3072)], [], [(more, 4096), (whole[2], 4096)]]
    reasons = ranks.on_each(lambda rank: memories[rank].register(parts[rank], None, 60.0))
    assert len(set(reasons)) == 1
    assert num_descriptors("memfd:fake") == before + 1, "only what the fake holds itself"
    if refused:
        assert f"rank 2: CUDA driver: {'cuIpcGetMemHandle' if 'Export' in refused else refused}" in reasons[0]
        assert refused in reasons[0]
        assert memories[0].regions.find(whole[0] + 1024, 1) is None
    else:
        assert reasons[0] == ""
        assert [memories[1].regions.bases(region)[1] for region in (1, 2)] == [0, 0]
        for peer, region, content in ((0, 1, 200), (2, 1, 202), (2, 2, 202)):
            assert ctypes.string_at(memories[1].regions.bases(region)[peer], 3072) == bytes([content]) * 3072
        ctypes.memset(whole[0] + 1024, 9, 1)
        assert ctypes.string_at(memories[1].regions.bases(1)[0], 2) == bytes([9, 200])
    assert ranks.on_each(lambda rank: memories[rank].close(TIMEOUT_S)) == [True] * 3
    assert not ranks.node.openings
