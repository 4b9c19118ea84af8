# SPDX-License-Identifier: Apache-2.0
"""A thread that waits in a library where nobody can wake it, so that the caller's own wait can be ended.

The caller hands over its wait and waits for the outcome. ``abandon`` gives it an outcome at once; the thread stays
behind until the library lets go of it. Costs two changes of thread a wait. Knows nothing of what is waited for.
"""

import queue
import threading
from collections.abc import Callable

from detcomm.errors import TransportError

Wait = Callable[[], None]


class WaitingThread:
    """The thread, started at the first wait.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waits: queue.SimpleQueue[Wait | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, wait: Wait, limit_s: float | None = None) -> None:
        """Have the thread call ``wait``; one thread at a time calls this, and not after ``abandon``.

        Args:
            limit_s: ``wait`` ends sooner by itself; without one it is trusted to.

        Raises:
            TransportError: ``abandon`` was called, or ``wait`` has not ended.
            BaseException: what ``wait`` raised.
        """
        if self._thread is None:
            # Not a method: the thread would keep this object, and what it belongs to, for ever.
            serve = (self._waits, self._outcomes)
            self._thread = threading.Thread(target=_serve, args=serve, name=self._name, daemon=True)
            self._thread.start()
        self._waits.put(wait)
        del wait  # an error that comes out names this frame, and is not to keep what was waited for
        try:
            outcome = self._outcomes.get(timeout=limit_s)
        except queue.Empty:
            outcome = TransportError(f"{self._name}: what should end within {limit_s:g} s has not ended")
        if outcome is not None:
            try:
                raise outcome
            finally:
                del outcome

    def abandon(self, error: TransportError) -> None:
        """Let a ``run`` of another thread raise now. The thread ends with the wait that it is in."""
        self._outcomes.put(error)
        self._waits.put(None)

    def close(self) -> None:
        """Let the thread end. Idempotent."""
        self._waits.put(None)


def _serve(waits: "queue.SimpleQueue[Wait | None]", outcomes: "queue.SimpleQueue[BaseException | None]") -> None:
    while (wait := waits.get()) is not None:
        outcome: BaseException | None = None
        try:
            wait()
        except BaseException as error:  # whoever waits gets it
            outcome = error
        del wait  # and with it the memory that was waited for
        outcomes.put(outcome)
        del outcome
