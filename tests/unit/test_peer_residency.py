# SPDX-License-Identifier: Apache-2.0
"""How many blocks may wait for peers: all groups of a device together within its bound, however they connect."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from detcomm.cuda.peer import residency
from detcomm.cuda.peer.residency import LEAST_BLOCKS, agree_on_blocks, give_back
from detcomm.errors import PeerTimeoutError

PROCESSORS = 24
DEVICE = 77


def _agree(store: Any, rank: int, bus: str = "0", timeout_s: float = 60.0) -> int:
    kernels: Any = SimpleNamespace(bus=bus, num_processors=PROCESSORS, device=DEVICE)
    return agree_on_blocks(store, rank, 2, kernels, 16, timeout_s, lambda: False)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "_held", {})


def _other_rank_says(store: Any, text: str) -> Any:
    store.set("1", text)
    return store


def test_groups_share_a_device_until_nothing_is_left() -> None:
    shares = [_agree(_other_rank_says(HashStore(), f"1 {PROCESSORS} 0"), 0) for _ in range(3)]
    assert shares == [16, 8, 0]
    give_back(DEVICE, 16)
    assert _agree(_other_rank_says(HashStore(), f"1 {PROCESSORS} {PROCESSORS - LEAST_BLOCKS}"), 0) == LEAST_BLOCKS


def test_ranks_on_one_device_halve_it_and_the_fullest_decides() -> None:
    assert _agree(_other_rank_says(HashStore(), f"0 {PROCESSORS} 5"), 0) == PROCESSORS // 2 - 5


def test_groups_that_connect_at_the_same_time_do_not_take_the_same_places() -> None:
    """The first has not heard of its peer when the second one asks."""
    first, shares = HashStore(), []
    thread = threading.Thread(target=lambda: shares.append(_agree(first, 0)))
    thread.start()
    first.wait(["0"])
    shares.append(_agree(_other_rank_says(HashStore(), f"1 {PROCESSORS} 0"), 0))
    _other_rank_says(first, f"1 {PROCESSORS} 0")
    thread.join()
    assert sorted(shares) == [PROCESSORS - 16, 16]


def test_a_group_that_does_not_come_together_holds_nothing() -> None:
    with pytest.raises(PeerTimeoutError, match="1"):
        _agree(HashStore(), 0, timeout_s=0.05)
    assert residency._held == {DEVICE: 0}
