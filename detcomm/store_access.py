# SPDX-License-Identifier: Apache-2.0
"""How detcomm reads and writes torch's key-value store.

``TCPStore.wait``, and ``get`` of an absent key, keep the client's lock and so block every other thread's ``set``; here
everybody polls ``check``. Works for TCPStore, FileStore, HashStore and prefixes of them.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast
from weakref import WeakValueDictionary

from torch.distributed import PrefixStore, Store

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.02
SILENCE_S = 20.0
"""For how long a network may fail before a host counts as vanished: longer than a switch needs to fail over."""
_KEYS_AT_ONCE = 64
"""All ranks ask one server: a round trip for many keys, but no long requests again and again in large groups."""

_shared: "WeakValueDictionary[object, Store]" = WeakValueDictionary()
_sharing = threading.Lock()


def read(store: Store, key: str) -> str | None:
    """The value of a key, or ``None`` if it is absent."""
    return store.get(key).decode() if store.check([key]) else None


def read_all(
    store: Store,
    keys: Sequence[str],
    timeout_s: float,
    stop: Callable[[], bool] = lambda: False,
) -> list[str | None]:
    """The values of all keys, as soon as all are there.

    Args:
        stop: asked at each poll; true ends the wait early.

    Returns:
        A value for each key; ``None`` for those absent when the time was over or ``stop`` said so.
    """
    deadline = time.monotonic() + timeout_s
    values: list[str | None] = []
    pause_s = _FIRST_PAUSE_S
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        block = list(keys[start : start + _KEYS_AT_ONCE])
        while not store.check(block):
            if time.monotonic() >= deadline or stop():
                # What is there now, so that the caller can name exactly those who are missing.
                return values + [read(store, key) for key in keys[start:]]
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        values += [value.decode() for value in store.multi_get(block)]
    return values


def group_key_space(store: Store, rank: int) -> Store:
    """A key space of this creation of the group alone, in the store that torch gives it.

    A group that is destroyed and made again has the same prefix in the same store (under torchrun the store outlives
    it) and would read its predecessor's keys. Every rank counts its own creations; the counts are equal, since
    creating a group is a collective.
    """
    number = store.add(f"detcomm/creations/{rank}", 1)
    return PrefixStore(f"detcomm/{number}", store)


def root_of(store: Store) -> Store:
    """The store below all prefixes."""
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    return store


def own_connection(store: Store) -> Store:
    """A client of the same store whose operations wait for nobody else's, and not for long for a host that vanished."""
    before = _open_sockets()
    connected: Store = cast(Any, store).clone()  # torch's stubs do not know it
    port = getattr(root_of(store), "port", None)
    if port is not None:
        for descriptor, _ in _open_sockets() - before:
            _limit_silence(descriptor, port)
    return connected


def shared_connection(store: Store) -> Store:
    """A client of the store below all prefixes, one for all in this process who poll it; lives while somebody holds it.

    Connecting anew each time may take long: torch asks a name server, which may not answer.
    """
    root = root_of(store)
    port = getattr(root, "port", None)
    if port is None:  # a file or this process's memory: nothing to connect to, and no name that it could be found by
        return own_connection(root)
    key = (os.getpid(), getattr(root, "host", None), port)
    with _sharing:
        shared = _shared.get(key)
        if shared is None or not _is_same(shared, root):
            shared = _shared[key] = own_connection(root)
        return shared


def _is_same(connection: Store, root: Store) -> bool:
    """Whether both lead to one server: another store may have been made at the address of one that has ended."""
    key, word = f"detcomm/connection/{os.getpid()}/{id(connection)}", secrets.token_hex(8)
    root.set(key, word)
    root.check([key])  # a TCPStore does not acknowledge a set; what it answers on this line, it answers after the set
    try:
        return read(connection, key) == word
    except RuntimeError:  # its server has gone
        return False


def _open_sockets() -> set[tuple[int, str]]:
    """Descriptor and identity of each socket of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (identity := os.readlink(f"/proc/self/fd/{name}")).startswith("socket:"):
                found.add((int(name), identity))
    return found


def _limit_silence(descriptor: int, port: int) -> None:
    """Have the kernel end a connection to this port when the other end acknowledges nothing any more.

    A store's client waits for answers without an end, and does not give its socket away.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as line:
        if line.family in (socket.AF_INET, socket.AF_INET6) and line.getpeername()[1] == port:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(SILENCE_S * 1000))


def serves(store: Store) -> bool:
    """Whether the server of a TCPStore lives in this process, so that the store ends with it."""
    port = getattr(root_of(store), "port", None)
    return port is not None and _listens_on(port, os.getpid())


@lru_cache(maxsize=64)
def _listens_on(port: int, pid: int) -> bool:
    """Whether a listening TCP socket of this process has this port; looked up once, since the tables are long."""
    inodes: set[str] = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{table}") as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return False
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") in inodes:
                return True
    return False
