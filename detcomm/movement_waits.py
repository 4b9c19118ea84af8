# SPDX-License-Identifier: Apache-2.0
"""Waits for what the stock group moves, which a failure of the group ends.

gloo, as a connection ends, does not tell who waits for a message that is half sent or half received: that wait would
last for its whole timeout. So each waits in a thread that can be left behind. Its group is left behind with it: to free
one, torch waits for its threads while it holds Python's lock. Knows nothing of what is moved.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from detcomm.errors import TransportError
from detcomm.transports.waiting_thread import WaitingThread

Told = Callable[[TransportError], None]
"""Somebody who waits without a thread: for a future."""


class MovementWaits:
    """One group's; several threads may wait at a time.

    Args:
        name: of the threads.
        group: the stock group; not freed before a wait has ended that was left behind.
    """

    def __init__(self, name: str, group: object) -> None:
        self._name = name
        self._group: object = group
        self._lock = threading.Lock()
        self._idle: list[WaitingThread] = []
        self._busy: set[WaitingThread] = set()
        self._told: dict[Told, Callable[[], Any]] = {}
        self._ending: TransportError | None = None
        self._is_closed = False

    def run(self, wait: Callable[[], Any]) -> None:
        """Call ``wait``, which ends by itself at some time.

        Raises:
            TransportError: ``end`` was called, before or meanwhile.
            Exception: what ``wait`` raised.
        """
        with self._lock:
            if self._ending is not None:
                raise TransportError(*self._ending.args)
            thread = self._idle.pop() if self._idle else WaitingThread(self._name)
            self._busy.add(thread)
        has_ended = False
        try:
            thread.run(partial(_wait_in, self._group, wait))
            has_ended = True
        except Exception:
            has_ended = True
            raise
        finally:  # interrupted, the thread is still in its wait
            self._put_back(thread, has_ended)

    def end(self, error: TransportError) -> None:
        """The group has failed: every wait of now and later raises. From any thread; the first error is kept."""
        with self._lock:
            if self._ending is not None:
                return
            self._ending = error
            busy, self._busy = self._busy, set()
            told, self._told = self._told, {}
        for thread in busy:
            thread.abandon(TransportError(*error.args))
        for tell, wait in told.items():
            threading.Thread(target=_wait_in, args=(self._group, wait), name=self._name, daemon=True).start()
            tell(TransportError(*error.args))
        self.close()

    def on_end(self, tell: Told, wait: Callable[[], Any]) -> None:
        """Call ``tell`` if the group fails before ``forget``; at once if it has.

        Args:
            wait: ends with what is moved; the group is not freed before.
        """
        with self._lock:
            if self._ending is None:
                self._told[tell] = wait
                return
            error = TransportError(*self._ending.args)
        tell(error)

    def forget(self, tell: Told) -> None:
        """The opposite of ``on_end``."""
        with self._lock:
            self._told.pop(tell, None)

    def close(self) -> None:
        """Let the threads end, each with the wait that it is in. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._group = None
            idle, self._idle = self._idle, []
        for thread in idle:
            thread.close()

    def _put_back(self, thread: WaitingThread, has_ended: bool) -> None:
        with self._lock:
            is_ours = thread in self._busy
            self._busy.discard(thread)
            if is_ours and has_ended and not self._is_closed:
                self._idle.append(thread)
                return
        thread.close()


def _wait_in(group: object, wait: Callable[[], Any]) -> None:
    wait()
    del group  # held until here
