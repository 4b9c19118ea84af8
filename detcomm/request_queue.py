# SPDX-License-Identifier: Apache-2.0
"""Requests of other threads to one that waits in a selector."""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from selectors import EVENT_READ, BaseSelector

_log = logging.getLogger("detcomm")


class RequestQueue:
    """A queue whose ``put`` wakes the selector's thread."""

    def __init__(self, selector: BaseSelector) -> None:
        self._waking, self._woken = socket.socketpair()
        self._waking.setblocking(False)
        self._woken.setblocking(False)
        self._requests: list[Callable[[], None]] = []
        self._changing = threading.Lock()
        selector.register(self._woken, EVENT_READ, self._drain)

    def put(self, request: Callable[[], None]) -> None:
        """Have something called by the thread, soon. From any thread."""
        with self._changing:
            self._requests.append(request)
        with contextlib.suppress(OSError):  # full means that it will wake anyway
            self._waking.send(b"w")

    def run_all(self) -> None:
        """Call what has been put, in order. A request that fails does not keep the others from running."""
        with self._changing:
            requests, self._requests = self._requests, []
        for request in requests:
            try:
                request()
            except Exception:
                _log.exception("a request to detcomm's watch failed")

    def close(self) -> None:
        """Close the sockets; the selector has been closed before."""
        self._waking.close()
        self._woken.close()

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
