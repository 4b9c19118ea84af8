# SPDX-License-Identifier: Apache-2.0
"""Lines between hosts: an end without a farewell is told, and nothing else is: not a caller who gave up."""

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from detcomm import lifeline
from detcomm.lifeline import Endpoint, Lifelines

NAME, GROUP = "n" * 32, "g" * 16
PATIENCE_S = 60.0


class _Host:
    """One process's lines, watched by a thread of its own."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self._selector = selectors.DefaultSelector()
        self.lines = Lifelines(self._selector, self.ended.append)
        self.endpoint = self.lines.listen(("127.0.0.1",))
        self._goes_on = True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while self._goes_on:
            for key, _ in self._selector.select(0.01):
                key.data()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def num_sockets(self) -> int:
        try:
            return len(list(self.lines.sockets()))
        except RuntimeError:  # the other thread adds one, or closes it, this moment
            return -1

    def close(self) -> None:
        self._goes_on = False
        self._thread.join()
        self.lines.close()


@pytest.fixture
def host() -> Iterator[_Host]:
    host = _Host()
    yield host
    host.close()


def _call(endpoint: Endpoint) -> socket.socket:
    """Somebody who has said who calls, and has not heard yet."""
    line = socket.create_connection(("127.0.0.1", endpoint.port), timeout=PATIENCE_S)
    line.sendall(bytes.fromhex(endpoint.secret) + NAME.encode() + GROUP.encode())
    return line


def test_an_end_is_told_and_a_farewell_is_none(host: _Host) -> None:
    line, other = (lifeline.connect(host.endpoint, name * 32, GROUP) for name in "no")
    assert line is not None
    assert other is not None
    other.sendall(b"f")
    other.close()
    host.wait_until(lambda: host.num_sockets() == 2)  # the listener, and the line that is left
    assert host.ended == []
    line.close()
    host.wait_until(lambda: host.ended == [NAME])


def test_a_caller_who_did_not_wait_for_the_welcome_is_not_dead(host: _Host) -> None:
    """Its network was slow: it hangs up, and calls again or goes without."""
    line = _call(host.endpoint)
    assert line.recv(1) == b"w"
    host.wait_until(lambda: host.num_sockets() == 2)
    line.close()
    host.wait_until(lambda: host.num_sockets() == 1)
    assert host.ended == []


def test_strangers_are_not_welcome(host: _Host) -> None:
    wrong = Endpoint(host.endpoint.addresses, host.endpoint.port, "00" * 16)
    assert lifeline.connect(wrong, NAME, GROUP) is None
    host.wait_until(lambda: host.num_sockets() == 1)
    assert host.ended == []
