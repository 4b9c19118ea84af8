# SPDX-License-Identifier: Apache-2.0
"""Memory that the ranks of a block map from each other: proved, or refused by all; freed when nobody can read it."""

import ctypes
import time
from typing import Any

import pytest

from detcomm import store_access
from detcomm.cuda.peer_memory import meeting
from detcomm.cuda.peer_memory.connect import Refusal
from detcomm.cuda.peer_memory.retirement import reclaim
from detcomm.cuda.peer_memory.sharing import PAD_BYTES
from detcomm.errors import PeerTimeoutError, TransportError
from tests.peer_ranks import STAGING_BYTES, TIMEOUT_S, PeerRanks


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
    assert ranks.on_each(lambda rank: memories[rank].close(TIMEOUT_S)) == [True] * world_size
    assert (ranks.node.num_left, ranks.node.violations) == (0, [])


def test_blocks_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(5, monkeypatch)
    memories = ranks.memories(block_size=2)
    assert [memory.ranks for memory in memories] == [(0, 1), (0, 1), (2, 3), (2, 3), (4,)]
    assert [memory.index for memory in memories] == [0, 1, 0, 1, 0]
    assert ranks.on_each(lambda rank: memories[rank].close(TIMEOUT_S)) == [True] * 5
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


def test_whatever_fails_on_a_rank_all_come_to_the_same_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of the driver in turn, on the way to a connection and to a further segment."""

    def make(rank: int) -> str:
        memory = ranks.connect_rank(rank)
        if isinstance(memory, Refusal):
            return memory.reason
        try:
            memory.add_segment(100, 60.0)
            return "both"
        except TransportError as error:
            return str(error)

    number, ends = 0, set()
    while "both" not in ends:
        ranks = PeerRanks(3, monkeypatch)
        ranks.gpus[1].fails_at = number
        told = ranks.on_each(make)
        assert len(set(told)) == 1, f"call {number}: {told}"
        ends.add(told[0])
        failed = [*ranks.gpus[1].calls[: number + 1], *[""] * number][number]
        assert failed in told[0], f"call {number}, {failed}: {told[0]}"
        assert ranks.node.violations == []
        number += 1
    assert number > 30


def test_other_memory_than_the_peers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(3, monkeypatch)
    ranks.node.confused.add(1)
    refusals = ranks.connect()
    assert len(set(refusals)) == 1
    assert "rank 1: what is mapped as memory of rank 0 is other memory" in refusals[0].reason
    assert ranks.node.num_left == 0


def _late(monkeypatch: pytest.MonkeyPatch, *absent: str) -> None:
    """Time is over as soon as all keys are there but those that end so: no test depends on how fast a rank is."""
    read_all = store_access.read_all

    def read(store: Any, keys: list[str], timeout_s: float, stop: Any) -> list[str | None]:
        present = [key for key in keys if not key.endswith(absent)]
        values = dict(zip(present, read_all(store, present, timeout_s, stop), strict=True))
        return [values.get(key) for key in keys]

    monkeypatch.setattr(meeting.store_access, "read_all", read)


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(4, monkeypatch)
    _late(monkeypatch, "device/0/2")
    for error in ranks.connect(ranks=[0, 1, 3]):
        assert isinstance(error, PeerTimeoutError)
        assert "rank 2 did not come to connect peer memory" in str(error)


def test_an_absent_rank_of_another_block_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(4, monkeypatch)
    _late(monkeypatch, "device/1/2", "verdict 1/device/1")
    errors = ranks.connect(block_size=2, ranks=[0, 1, 3])
    assert all(isinstance(error, PeerTimeoutError) for error in errors)
    assert all("rank 2 did not come" in str(error) for error in errors)


def test_a_rank_that_is_late_is_not_waited_for_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(2, monkeypatch)
    (error,) = ranks.connect(ranks=[0], timeout_s=0.05)
    assert isinstance(error, PeerTimeoutError)


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
        assert ranks.on_each(lambda rank, of=memories: of[rank].close(TIMEOUT_S)) == [True] * 3
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
    assert ranks.on_each(lambda rank: memories[rank].close(TIMEOUT_S), [1]) == [True], "all others have let go by now"
    ranks.on_each(lambda rank: reclaim(), [0])
    assert (ranks.node.num_left, ranks.node.violations) == (0, [])
    assert [memory.close(TIMEOUT_S) for memory in memories] == [True] * 3


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
    assert ranks.on_each(lambda rank: memories[rank].close(TIMEOUT_S)) == [True, True]
    assert words.error() == 0, "the memory is gone"
    words.abort()
