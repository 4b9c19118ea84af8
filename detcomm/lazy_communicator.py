# SPDX-License-Identifier: Apache-2.0
"""The communicator of a group, connected when its first reduction comes: a job makes many groups that reduce nothing.

All ranks come to that call in their own time, so it may wait for them as the call itself may: as long as the call's
timeout, and no longer than the group lives. Knows nothing of transports.
"""

import threading
import time
from collections.abc import Callable

from detcomm.abandonable import Abandonable
from detcomm.communicator import Communicator
from detcomm.errors import PeerTimeoutError, TransportError

Connect = Callable[[float, Callable[[], bool]], Communicator]
"""Connects, from a timeout in seconds and what tells whether to give up; called by all ranks."""


_OVERTIME_S = 10.0
"""What connects has the same deadline and says who is late; after that it is stuck in a store that does not answer."""


class LazyCommunicator:
    """A ``Communicator``, or none yet.

    Args:
        name: of the group, for error texts.
    """

    def __init__(self, name: str, connect: Connect) -> None:
        self._name = name
        self._connect: Connect | None = connect
        self._failure: str | None = None
        self._changed = threading.Event()
        self._changing = threading.Lock()
        self.made: Communicator | None = None

    @property
    def sequence(self) -> int:
        """Agreements so far."""
        return 0 if self.made is None else self.made.sequence

    def connect(self, timeout_s: float) -> tuple[Communicator, float]:
        """Connect, at this rank's first reduction in the group; one thread at a time calls this.

        Returns:
            The communicator, and how many seconds are left for the call itself.

        Raises:
            UsageError: the transport named in the options does not fit these ranks.
            TransportError: it does not work, with one text on all ranks; or ``abort`` was called meanwhile.
            PeerTimeoutError: ranks did not come to their first reduction; names them.
        """
        connect = self._connect
        if connect is None or self._failure is not None:
            raise self._given_up()
        deadline = time.monotonic() + timeout_s
        started = Abandonable(
            f"detcomm-connect-{self._name}",
            lambda: connect(timeout_s, lambda: self._failure is not None),
            lambda made: made.close(),
            self._changed,
        )
        try:
            while not (started.has_ended or self._failure is not None):
                if not self._changed.wait(max(deadline + _OVERTIME_S - time.monotonic(), 0.0)):
                    self.abort(f"the store did not answer within {timeout_s:g} s")
                    raise PeerTimeoutError(str(self._given_up()))
                self._changed.clear()
        except BaseException as error:  # an interrupt, too: a second attempt would meet the keys of this one
            self.abort(f"its connection was given up: {error!r}")
            for late in started.take_or_abandon():
                late.close()
            raise
        with self._changing:
            made = started.take_or_abandon()
            if made and self._failure is None:
                self.made = made[0]
                return made[0], max(deadline - time.monotonic(), 0.0)
        if made:
            made[0].close()
        raise started.take_error() or self._given_up()

    def abort(self, reason: str) -> None:
        """End what runs on another thread, be it the connection; refuse everything later. From any thread."""
        with self._changing:
            self._failure = self._failure or reason
            made = self.made
        self._changed.set()
        if made is not None:
            made.abort(reason)

    def close(self) -> None:
        """Release everything. Idempotent; never waits for a peer."""
        with self._changing:
            self._failure = self._failure or "it was closed"
            made = self.made
        self._changed.set()
        self._connect = None  # it holds network devices and a connection, which are released with the last reference
        if made is not None:
            made.close()

    def _given_up(self) -> TransportError:
        return TransportError(f"group {self._name} was not connected: {self._failure or 'it was closed'}")
