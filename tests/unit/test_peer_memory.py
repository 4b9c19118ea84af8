# SPDX-License-Identifier: Apache-2.0
"""Memory that the ranks of a block map from each other: proved, or refused by all; freed when nobody can read it."""

import ctypes
import os
import struct
import time
from typing import Any

import pytest

from detcomm.cuda.peer_memory.connect import Refusal
from detcomm.cuda.peer_memory.memory import PeerMemory, reclaim
from detcomm.cuda.peer_memory.regions import MAX_REGIONS, Place
from detcomm.cuda.peer_memory.sharing import PAD_BYTES
from detcomm.errors import PeerTimeoutError, TransportError
from tests.peer_ranks import STAGING_BYTES, PeerRanks


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_every_rank_sees_the_others(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(world_size, monkeypatch)
    memories = ranks.memories()
    for rank, memory in enumerate(memories):
        segment = memory.segment
        assert (memory.ranks, memory.index) == (tuple(range(world_size)), rank)
        assert segment.staging_bytes >= STAGING_BYTES
        assert all(address % 512 == 0 for address in (*segment.pads, *segment.staging))
        assert ctypes.string_at(segment.pads[rank], PAD_BYTES) == bytes(PAD_BYTES)
        ctypes.memset(segment.pads[rank], rank + 1, PAD_BYTES)
        ctypes.memset(segment.staging[rank], rank + 101, STAGING_BYTES)
    for memory in memories:
        for peer in range(world_size):
            assert ctypes.string_at(memory.segment.pads[peer], PAD_BYTES) == bytes([peer + 1]) * PAD_BYTES
            assert ctypes.string_at(memory.segment.staging[peer], STAGING_BYTES) == bytes([peer + 101]) * STAGING_BYTES
    assert len({address for memory in memories for address in memory.segment.pads}) == world_size**2
    assert ranks.on_each(lambda rank: memories[rank].close()) == [True] * world_size
    assert (ranks.node.num_left, ranks.node.violations) == (0, [])


def test_blocks_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(5, monkeypatch)
    memories = ranks.memories(block_size=2)
    assert [memory.ranks for memory in memories] == [(0, 1), (0, 1), (2, 3), (2, 3), (4,)]
    assert [memory.index for memory in memories] == [0, 1, 0, 1, 0]
    assert ranks.on_each(lambda rank: memories[rank].close()) == [True] * 5
    assert ranks.node.num_left == 0


def test_ranks_without_a_neighbour_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(3, monkeypatch)
    refusals = set(ranks.connect(block_size=1))
    assert refusals == {Refusal("no two of the 3 ranks are neighbours on one host (blocks of 1)")}


@pytest.mark.parametrize(
    "function",
    ["cuStreamCreate", "cuMemHostAlloc", "cuMemAlloc_v2", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2"],
)
@pytest.mark.parametrize("block_size", [2, 8])
def test_what_one_rank_cannot_all_refuse(function: str, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its block or in another one; and what was made meanwhile is given back."""
    ranks = PeerRanks(5, monkeypatch)
    ranks.gpus[2].fails[function] = 999
    refusals = ranks.connect(block_size)
    assert len(set(refusals)) == 1
    assert f"rank 2: CUDA driver: {function} failed: error 999" in refusals[0].reason
    assert (ranks.node.num_left, ranks.node.violations) == (0, [])


def test_other_memory_than_the_peers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(3, monkeypatch)
    ranks.node.confused.add(1)
    refusals = ranks.connect()
    assert len(set(refusals)) == 1
    assert "rank 1: what is mapped as memory of rank 0 is other memory" in refusals[0].reason
    assert ranks.node.num_left == 0


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(4, monkeypatch)
    for error in ranks.connect(ranks=[0, 1, 3], timeout_s=0.3):
        assert isinstance(error, PeerTimeoutError)
        assert "rank 2 did not come to connect peer memory" in str(error)


def test_an_absent_rank_of_another_block_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(4, monkeypatch)
    errors = ranks.connect(block_size=2, ranks=[0, 1, 3], timeout_s=0.5)
    assert all(isinstance(error, PeerTimeoutError) for error in errors)
    assert "rank 2 did not come" in str(errors[0])


def test_a_failure_of_the_group_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(3, monkeypatch)
    ranks.failures[:] = [TransportError("rank 2 has died")] * 3
    for error in ranks.connect(ranks=[0, 1], timeout_s=600.0):
        assert isinstance(error, TransportError)
        assert not isinstance(error, PeerTimeoutError)
        assert "rank 2 has died" in str(error)


class _EndedStore:
    def set(self, key: str, text: str) -> None:
        raise RuntimeError("Broken pipe\nstack")


def test_a_store_that_has_ended_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(2, monkeypatch)
    ranks.store = _EndedStore()
    for error in ranks.connect():
        assert isinstance(error, TransportError)
        assert str(error) == "group g: peer memory was not connected (device): Broken pipe"


def test_nothing_is_left_after_many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(3, monkeypatch)
    for _ in range(20):
        memories = ranks.memories()
        ranks.on_each(lambda rank, of=memories: of[rank].add_segment(100, 60.0))
        assert ranks.on_each(lambda rank, of=memories: of[rank].close()) == [True] * 3
        ranks.store = type(ranks.store)()
        assert ranks.node.num_left == 0
    assert ranks.node.violations == []


def test_memory_is_not_freed_before_the_last_peer_has_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """And who was too early frees it when the next group comes."""
    ranks = PeerRanks(3, monkeypatch)
    memories = ranks.memories()
    assert ranks.on_each(lambda rank: memories[rank].close(patience_s=0.1), [0, 2]) == [False, False]
    assert {allocation.owner for allocation in ranks.node.allocations.values()} == {0, 1, 2}
    assert ctypes.string_at(memories[1].segment.pads[0], PAD_BYTES) == bytes(PAD_BYTES)
    ranks.on_each(lambda rank: reclaim(), [0])
    assert {allocation.owner for allocation in ranks.node.allocations.values()} == {0, 1, 2}
    assert ranks.on_each(lambda rank: memories[rank].close(), [1]) == [True], "all others have let go by now"
    ranks.on_each(lambda rank: reclaim(), [0])
    assert (ranks.node.num_left, ranks.node.violations) == (0, [])
    assert [memory.close() for memory in memories] == [True] * 3


def test_after_a_failure_nobody_waits_and_nothing_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(2, monkeypatch)
    memories = ranks.memories()
    assert [memory.words.host[memory.words.ABORT] for memory in memories] == [0, 0]
    memories[0].abandon()
    assert [memory.words.host[memory.words.ABORT] for memory in memories] == [1, 0]
    started = time.monotonic()
    assert ranks.on_each(lambda rank: memories[rank].close(patience_s=600.0), [0]) == [False]
    assert time.monotonic() - started < 300.0
    assert len(ranks.node.allocations) == 2


def test_a_kernels_word_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(2, monkeypatch)
    memories = ranks.memories()
    words = memories[1].words
    assert words.error() == 0
    ctypes.c_uint32.from_address(words.device + 4 * words.ERROR).value = 77
    assert words.error() == 77
    assert ranks.on_each(lambda rank: memories[rank].close()) == [True, True]
    assert words.error() == 0, "the memory is gone"
    words.abort()


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
    assert ranks.on_each(lambda rank: memories[rank].close()) == [True] * 3
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
    assert ranks.on_each(lambda rank: memories[rank].close()) == [True] * 3


def test_too_many_regions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(2, monkeypatch)
    memories = ranks.memories()
    whole = _allocate(ranks, 0, 4096)
    parts = [(whole, 16)] * MAX_REGIONS
    reasons = ranks.on_each(lambda rank: memories[rank].register(parts if rank == 0 else [], None, 60.0))
    assert reasons == ["256 parts of memory; there is room for 255 more in a group"] * 2
    assert ranks.on_each(lambda rank: memories[rank].close()) == [True, True]


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
    assert ranks.on_each(lambda rank: memories[rank].close()) == [True] * 3
    assert ranks.node.violations == []


@pytest.mark.parametrize("refused", ["", "cuMemExportToShareableHandle", "cuMemMap"])
def test_memory_without_a_handle_is_shared_by_descriptors(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's symmetric memory and NCCL's allocations are; one rank may have either kind, or nothing."""
    ranks = PeerRanks(3, monkeypatch)
    memories = ranks.memories()
    whole = [_allocate(ranks, rank, 4096) for rank in range(3)]
    for address in (whole[0], whole[2]):
        ranks.node.allocations[address].is_virtual = True
    num_descriptors = len(os.listdir("/proc/self/fd"))
    if refused:
        ranks.gpus[2].fails[refused] = 801
    more = _allocate(ranks, 2, 4096)
    parts: list[Any] = [[(whole[0] + 1024, 3072)], [], [(more, 4096), (whole[2], 4096)]]
    reasons = ranks.on_each(lambda rank: memories[rank].register(parts[rank], None, 60.0))
    assert len(set(reasons)) == 1
    assert len(os.listdir("/proc/self/fd")) == num_descriptors + 1, "only what the fake holds itself"
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
    assert ranks.on_each(lambda rank: memories[rank].close()) == [True] * 3
    assert not ranks.node.openings
