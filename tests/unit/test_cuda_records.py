# SPDX-License-Identifier: Apache-2.0
"""After a timeout on the GPU: who was at which call, through the store, and into the error that the group is told."""

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from detcomm.cuda import records
from detcomm.cuda.group import CudaGroup
from detcomm.cuda.records import compare_records
from detcomm.errors import PeerTimeoutError, TransportError
from detcomm.options import Options


def test_records_name_who_differs_and_who_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_PATIENCE_S", 0.05)
    store = HashStore()
    store.set("records/1", "#4 all_reduce(sum, float32[8])")
    store.set("records/2", "#4 all_reduce(sum, float32[9])")
    text = compare_records(store, 0, 4, "#4 all_reduce(sum, float32[8])")
    assert text == (
        "the ranks' calls do not match: rank 0, 1 at #4 all_reduce(sum, float32[8]); "
        "rank 2 at #4 all_reduce(sum, float32[9]); rank 3 has lost no patience: it may not have made this call"
    )


def test_records_of_one_call_are_no_mismatch() -> None:
    store = HashStore()
    store.set("records/1", "#4 all_gather(int8[8])")
    assert compare_records(store, 0, 2, "#4 all_gather(int8[8])") == "rank 0, 1 at #4 all_gather(int8[8])"


def test_a_store_that_is_gone_hides_no_timeout() -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("connection reset")

    assert compare_records(Gone(), 0, 2, "x") == "the other ranks' records cannot be read: connection reset"


def _told(texts: list[str | None]) -> list[str]:
    """What the groups of all ranks are told when each loses patience at its call, a little after the one before."""
    store = HashStore()
    told: list[TransportError] = []

    def lose_patience(rank: int, text: str | None) -> None:
        group = CudaGroup(
            "g", rank, len(texts), Options(), 1, store, timedelta(seconds=60), told.append, lambda: None
        )  # fmt: skip
        oldest = None if text is None else SimpleNamespace(sequence=7, text=text)
        at: Any = SimpleNamespace(oldest=oldest)
        group._communicator = at
        group._explain(PeerTimeoutError(f"rank {rank} is late"))

    threads = [threading.Timer(0.1 * rank, lose_patience, each) for rank, each in enumerate(enumerate(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(error, PeerTimeoutError) for error in told)
    return sorted(map(str, told))


def test_every_rank_is_told_of_calls_that_differ() -> None:
    differing = "all_reduce(sum, float32[9])"
    told = _told(["all_reduce(sum, float32[8])", differing, "all_reduce(sum, float32[8])"])
    assert told == [
        f"rank {rank} is late; the ranks' calls do not match: rank 0, 2 at #7 all_reduce(sum, float32[8]); "
        f"rank 1 at #7 {differing}"
        for rank in range(3)
    ]


def test_equal_calls_are_told_as_one() -> None:
    assert _told(["all_gather(int8[8])"] * 2) == [
        f"rank {rank} is late; rank 0, 1 at #7 all_gather(int8[8])" for rank in range(2)
    ]
