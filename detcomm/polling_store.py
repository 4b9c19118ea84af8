# SPDX-License-Identifier: Apache-2.0
"""Torch's key-value store for those who would wait in it: waiting polls, and so stops no other user of the connection.

Gloo waits in the store for its peers' addresses; ``TCPStore`` keeps the client's lock meanwhile. Where several groups
connect at the same time over one client, in another order on another rank, they would wait for each other.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store


class PollingStore(Store):
    """The same keys and values, under torch's names of the methods.

    Args:
        store: asked, never waited in.
        timeout_s: for a ``get`` or a ``wait`` without a timeout of its own.
        give_up: asked meanwhile; true ends the wait.
    """

    _PAUSE_S = 0.002

    def __init__(self, store: Store, timeout_s: float, give_up: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._timeout_s = timeout_s
        self._give_up = give_up

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return as soon as all keys are there.

        Raises:
            RuntimeError: they did not come in time, or the caller gave up.
        """
        deadline = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        while not self.check(keys):
            if time.monotonic() >= deadline or self._give_up():
                raise RuntimeError(f"{', '.join(keys)}: not in the store")
            time.sleep(self._PAUSE_S)

    def has_extended_api(self) -> bool:
        return False
