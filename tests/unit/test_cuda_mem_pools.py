# SPDX-License-Identifier: Apache-2.0
"""A pool of torch's allocator, registered: what it holds on this device, once, and again what it has grown by."""

import ctypes
from typing import Any

import pytest

from detcomm.cuda import mem_pools
from detcomm.errors import UsageError
from tests.peer_ranks import TIMEOUT_S, PeerRanks


class _Pool:
    """As ``torch.cuda.MemPool`` tells what it holds."""

    def __init__(self, *segments: tuple[int, int, int]) -> None:
        self.segments = list(segments)

    def snapshot(self) -> list[dict[str, Any]]:
        names = ("address", "total_size", "device")
        return [dict(zip(names, segment, strict=True)) for segment in self.segments]


def _segment(ranks: PeerRanks, rank: int, device: int = 0) -> tuple[int, int, int]:
    address = ctypes.c_void_p()
    ranks.gpus[rank].call("cuMemAlloc_v2", ctypes.byref(address), 8192)
    assert address.value is not None
    return address.value, 8192, device


def test_a_pool_is_registered_as_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(3, monkeypatch)
    memories = ranks.memories()
    pools = [_Pool(_segment(ranks, rank), _segment(ranks, rank, device=1)) for rank in range(3)]

    def register(rank: int) -> int:
        return mem_pools.register(memories[rank], pools[rank], 0, TIMEOUT_S)

    assert ranks.on_each(register) == [8192] * 3
    pools[1].segments += [_segment(ranks, 1), _segment(ranks, 1)]
    assert ranks.on_each(register) == [0, 2 * 8192, 0]
    for rank, memory in enumerate(memories):
        found = [memory.regions.find(start, size) is not None for start, size, _ in pools[rank].segments]
        assert found == [True, False, *[True] * (len(found) - 2)]
    ranks.on_each(lambda rank: memories[rank].deregister(pools[rank], TIMEOUT_S))
    assert all(memories[1].regions.find(start, size) is None for start, size, _ in pools[1].segments)
    assert ranks.on_each(register) == [8192, 3 * 8192, 8192]
    assert ranks.on_each(lambda rank: memories[rank].close(TIMEOUT_S)) == [True] * 3
    assert (ranks.node.violations, ranks.node.openings) == ([], {})


def test_a_pool_that_cannot_be_shared_is_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerRanks(2, monkeypatch)
    memories = ranks.memories()
    pools = [_Pool(_segment(ranks, 0)), _Pool((0x1000, 8192, 0))]
    errors = ranks.on_each(lambda rank: mem_pools.register(memories[rank], pools[rank], 0, TIMEOUT_S))
    assert all(isinstance(error, UsageError) for error in errors)
    assert str(errors[0]) == str(errors[1])
    assert "register_mem_pool: the pool's memory cannot be shared between the ranks: rank 1: " in str(errors[0])
    assert memories[0].regions.find(*pools[0].segments[0][:2]) is None
    assert ranks.on_each(lambda rank: memories[rank].close(TIMEOUT_S)) == [True] * 2
