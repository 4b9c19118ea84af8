# SPDX-License-Identifier: Apache-2.0
"""What has been issued to a GPU and may not be done: kept alive until it is, oldest first."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from detcomm.call import Call
from detcomm.cuda.events import Event
from detcomm.header import call_text


class InFlight(NamedTuple):
    """One call, or several of one block.

    Attributes:
        call: the first of them.
        label: its element type as the caller knows it, where it differs.
        num_more: how many others there are.
        event: behind it.
        deadline: on the monotonic clock.
        kept: what it uses.
    """

    sequence: int
    call: Call
    label: str
    num_more: int
    event: Event
    deadline: float
    kept: list[Any]

    @property
    def text(self) -> str:
        """For people; made when somebody asks."""
        return call_text(self.call, self.label) + (f" and {self.num_more} more" if self.num_more else "")


class InFlightQueue:
    """Calls in the order in which they were issued, which is that in which they end. Any thread may use it."""

    def __init__(self) -> None:
        self._calls: deque[InFlight] = deque()
        self._lock = threading.Lock()

    @property
    def oldest(self) -> InFlight | None:
        """The call that the GPU is at, as far as is known."""
        with self._lock:
            return self._calls[0] if self._calls else None

    def add(self, call: InFlight) -> None:
        """The newest call. Without the lock: at this end nobody takes one away, and ``append`` is one step."""
        self._calls.append(call)

    def let_go(self, check: Callable[[], None]) -> InFlight | None:
        """Drop what is done; the oldest that is not.

        Args:
            check: raises if what is done was given up. Then nothing is dropped: the oldest call can be named.

        Raises:
            NativeError: the device has failed.
        """
        with self._lock:
            num_done = 0
            while num_done < len(self._calls) and self._calls[num_done].event.is_done():
                num_done += 1
            if num_done:
                check()
            finished = [self._calls.popleft() for _ in range(num_done)]
            oldest = self._calls[0] if self._calls else None
        del finished  # outside the lock: this may free tensors
        return oldest

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._calls.clear()
