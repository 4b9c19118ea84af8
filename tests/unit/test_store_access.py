# SPDX-License-Identifier: Apache-2.0
"""Connections to the store that nobody waits in."""

import threading
import weakref
from datetime import timedelta
from typing import cast

import pytest
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from detcomm import store_access
from detcomm.polling_store import PollingStore
from detcomm.store_access import shared_connection


def test_a_connection_is_shared_as_long_as_it_is_held() -> None:
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    other = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    shared = shared_connection(PrefixStore("a", store))
    assert shared_connection(PrefixStore("b", store)) is shared
    assert shared is not store
    assert shared_connection(other) is not shared
    store.set("key", "value")
    assert shared.get("key") == b"value"
    gone = weakref.ref(shared)
    del shared
    assert gone() is None


class _Line:
    """A client of a server that reads the lines of its clients in any order, and answers all but ``set``."""

    def __init__(self, served: dict[str, str]) -> None:
        self._served = served
        self._sent: list[tuple[str, str]] = []

    def set(self, key: str, value: str) -> None:
        self._sent.append((key, value))

    def check(self, keys: list[str]) -> bool:
        self._served.update(self._sent)
        return all(key in self._served for key in keys)

    def get(self, key: str) -> bytes:
        return self._served[key].encode()


def test_a_set_that_the_server_has_yet_to_read_is_no_other_server() -> None:
    served: dict[str, str] = {}
    assert store_access._is_same(cast(Store, _Line(served)), cast(Store, _Line(served)))
    assert not store_access._is_same(cast(Store, _Line({})), cast(Store, _Line({})))


def test_who_waits_gets_what_comes() -> None:
    store = HashStore()
    polling = PollingStore(PrefixStore("here", store), 60.0, lambda: False)
    threading.Timer(0.05, lambda: store.set("here/key", "value")).start()
    assert PrefixStore("deeper", polling).check(["key"]) is False
    assert polling.get("key") == b"value"
    polling.wait(["key"])
    assert polling.add("count", 2) == 2


def test_a_wait_ends() -> None:
    with pytest.raises(RuntimeError, match="key: not in the store"):
        PollingStore(HashStore(), 60.0, lambda: True).wait(["key"])
    with pytest.raises(RuntimeError, match="key: not in the store"):
        PollingStore(HashStore(), 60.0, lambda: False).wait(["key"], timedelta(seconds=0.01))
    with pytest.raises(RuntimeError, match="key: not in the store"):
        PollingStore(HashStore(), 0.01, lambda: False).get("key")
