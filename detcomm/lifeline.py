# SPDX-License-Identifier: Apache-2.0
"""A TCP connection that carries nothing: the kernel ends it when the process at its other end dies.

Unlike a heartbeat it cannot be late because a process is busy: a rank that compiles, or holds the interpreter for ten
seconds, is alive. A host that vanishes without closing its connections is noticed by keep-alive probes.

Knows processes by name only; nothing of ranks and groups.
"""

import contextlib
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from selectors import EVENT_READ, BaseSelector

_SECRET_BYTES = 16
_NAME_BYTES = 32
_GROUP_BYTES = 16
_MOST_GREETING = 64
"""Callers that have not shown the secret yet; strangers beyond that are dropped, the oldest first."""
_WELCOME = b"w"
_THANKS = b"t"
_FAREWELL = b"f"
_CONNECT_TIMEOUT_S = 2.0

_KEEPALIVE_IDLE_S = 5
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_PROBES = 3
"""20 seconds until a vanished host is noticed: longer than a switch needs to fail over."""


@dataclass(frozen=True)
class Endpoint:
    """Where a process can be reached, to be published in the store.

    Args:
        addresses: to be tried in this order; some may lead elsewhere, which the secret finds out.
        secret: hexadecimal; who knows it has read the store.
    """

    addresses: tuple[str, ...]
    port: int
    secret: str


def connect(endpoint: Endpoint, own_name: str, group: str) -> socket.socket | None:
    """A line to the process at an endpoint, or ``None`` if it cannot be reached.

    Args:
        own_name: this process's, of 32 ASCII characters.
        group: the key of the group that the line is for, of 16 ASCII characters.
    """
    hello = bytes.fromhex(endpoint.secret) + own_name.encode() + group.encode()
    for address in endpoint.addresses:
        with contextlib.suppress(OSError):
            line = socket.create_connection((address, endpoint.port), timeout=_CONNECT_TIMEOUT_S)
            with contextlib.ExitStack() as closing:
                closing.callback(line.close)
                line.sendall(hello)
                if line.recv(1) == _WELCOME:
                    line.sendall(_THANKS)
                    closing.pop_all()
                    return line
    return None


def reachable_addresses(store_host: str | None, store_port: int) -> tuple[str, ...]:
    """Addresses of this host that others may reach: first the one from which this host reaches the store."""
    found: list[str] = []
    if store_host is not None:
        with contextlib.suppress(OSError):
            family, kind, _, _, target = socket.getaddrinfo(store_host, store_port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # chooses a route; a datagram socket sends nothing here
                found.append(str(probe.getsockname()[0]))
    with contextlib.suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
    unique = dict.fromkeys(address for address in found if not address.startswith("fe80"))
    return tuple(sorted(unique, key=lambda address: address.startswith("127.") or address == "::1"))


class Lifelines:
    """The lines of this process, watched through a selector whose thread calls everything here.

    Args:
        on_end: called with a process's name when its line ends without a farewell.
    """

    def __init__(self, selector: BaseSelector, on_end: Callable[[str], None]) -> None:
        self._selector = selector
        self._on_end = on_end
        self._listener: socket.socket | None = None
        self._secret = b""
        self._greeting: dict[socket.socket, bytes] = {}
        self._lines: dict[socket.socket, tuple[str, str]] = {}
        self._unthanked: set[socket.socket] = set()

    def listen(self, addresses: tuple[str, ...]) -> Endpoint:
        """Accept lines from now on; the same endpoint at every call."""
        if self._listener is None:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
            self._listener.setblocking(False)
            self._secret = secrets.token_bytes(_SECRET_BYTES)
            self._selector.register(self._listener, EVENT_READ, self._accept)
        return Endpoint(addresses, self._listener.getsockname()[1], self._secret.hex())

    def add(self, line: socket.socket, process: str, group: str) -> None:
        """Watch a connected line to a process, for a group."""
        line.setblocking(False)
        _keep_alive(line)
        self._lines[line] = process, group
        self._selector.register(line, EVENT_READ, lambda: self._read(line))

    def drop(self, group: str) -> None:
        """End the lines of a group in good order."""
        for line in [line for line, (_, name) in self._lines.items() if name == group]:
            with contextlib.suppress(OSError):
                line.send(_FAREWELL)
            self._close(line)

    def close(self) -> None:
        """End all lines in good order."""
        for group in {group for _, group in self._lines.values()}:
            self.drop(group)
        for line in list(self._greeting):
            self._close(line)
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def sockets(self) -> Iterator[socket.socket]:
        """All sockets held here, for a forked child to close."""
        yield from self._lines
        yield from self._greeting
        if self._listener is not None:
            yield self._listener

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            line, _ = self._listener.accept()
            if len(self._greeting) >= _MOST_GREETING:
                self._close(next(iter(self._greeting)))
            line.setblocking(False)
            self._greeting[line] = b""
            self._selector.register(line, EVENT_READ, lambda: self._greet(line))

    def _greet(self, line: socket.socket) -> None:
        """Collect the hello of a process that called, and welcome it if it knows the secret."""
        size = _SECRET_BYTES + _NAME_BYTES + _GROUP_BYTES
        try:
            part = line.recv(size - len(self._greeting[line]))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        self._greeting[line] += part
        hello = self._greeting[line]
        if part and len(hello) < size:
            return
        if not part or not secrets.compare_digest(hello[:_SECRET_BYTES], self._secret):
            self._close(line)
            return
        del self._greeting[line]
        self._selector.unregister(line)
        names = hello[_SECRET_BYTES:].decode()
        with contextlib.suppress(OSError):
            line.send(_WELCOME)
        # Until it answers, it may not have heard the welcome in time, and hang up though it is alive.
        self._unthanked.add(line)
        self.add(line, names[:_NAME_BYTES], names[_NAME_BYTES:])

    def _read(self, line: socket.socket) -> None:
        try:
            word = line.recv(1)
        except BlockingIOError:
            return
        except OSError:
            word = b""
        if word == _THANKS:
            self._unthanked.discard(line)
            return
        process, _ = self._lines[line]
        counts = line not in self._unthanked and word != _FAREWELL
        self._close(line)
        if counts:
            self._on_end(process)

    def _close(self, line: socket.socket) -> None:
        self._selector.unregister(line)
        self._lines.pop(line, None)
        self._greeting.pop(line, None)
        self._unthanked.discard(line)
        line.close()


def _keep_alive(line: socket.socket) -> None:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
