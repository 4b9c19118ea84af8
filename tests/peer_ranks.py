# SPDX-License-Identifier: Apache-2.0
"""The ranks of a group that share fake device memory, each a thread."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch.distributed import HashStore

from detcomm.cuda import libraries
from detcomm.cuda.peer_memory import device_access, host_words, ipc, virtual
from detcomm.cuda.peer_memory.connect import Refusal, connect_peer_memory
from detcomm.cuda.peer_memory.memory import PeerMemory
from tests.fake_device_memory import FakeDeviceMemory, FakeNode

STAGING_BYTES = 5000
TIMEOUT_S = 60.0


class PeerRanks:
    """All ranks of one group on one node."""

    def __init__(self, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node = FakeNode()
        self.gpus = [FakeDeviceMemory(self.node, rank) for rank in range(world_size)]
        self.store: Any = HashStore()
        self.failures: list[BaseException | None] = [None] * world_size
        self._here = threading.local()
        for module in (device_access, host_words, ipc, virtual, libraries):
            monkeypatch.setattr(module, "driver", lambda: self._here.gpu)

    def on_each(self, function: Callable[[int], Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """What ``function`` returns on each of ``ranks``, or raises."""
        ranks = range(len(self.gpus)) if ranks is None else ranks
        results: dict[int, Any] = {}

        def work(rank: int) -> None:
            self._here.gpu = self.gpus[rank]
            try:
                results[rank] = function(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in ranks]
        deadline = time.monotonic() + 2 * TIMEOUT_S
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        stuck = [rank for rank in ranks if rank not in results]
        assert not stuck, f"ranks {stuck} do not end"
        return [results[rank] for rank in ranks]

    def connect(self, block_size: int = 8, ranks: Sequence[int] | None = None, timeout_s: float = TIMEOUT_S) -> Any:
        """What ``connect_peer_memory`` gives on each of ``ranks``, or raises."""
        return self.on_each(lambda rank: self.connect_rank(rank, block_size, timeout_s), ranks)

    def connect_rank(self, rank: int, block_size: int = 8, timeout_s: float = TIMEOUT_S) -> PeerMemory | Refusal:
        """The same on one rank, from its thread."""
        return connect_peer_memory(
            self.store, "g", rank, len(self.gpus), block_size, 0, lambda: None, STAGING_BYTES,
            lambda: self.failures[rank], timeout_s, ["CUDA IPC"],
        )  # fmt: skip

    def memories(self, block_size: int = 8) -> list[PeerMemory]:
        """Connected ranks."""
        made: list[Any] = self.connect(block_size)
        assert all(isinstance(memory, PeerMemory) for memory in made), made
        return made
