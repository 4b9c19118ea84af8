# SPDX-License-Identifier: Apache-2.0
"""What an asynchronous call returns: a ``Work`` with a lazy ``Future``.

Knows nothing of what the work is. A future costs 2.4 us and is made when somebody asks for it.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from detcomm.errors import DetcommError, PeerTimeoutError

Raised = TypeVar("Raised", bound=BaseException)


class FinishedWork(dist.Work):
    """A call that is done already."""

    def __init__(self, results: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self._results = results or []

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def synchronize(self) -> None:
        pass

    def block_current_stream(self) -> None:
        pass

    def result(self) -> list[torch.Tensor]:
        return self._results

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._results)
        return future


FINISHED = FinishedWork()
"""For synchronous calls: torch asks nothing of it but ``wait``."""


class HostWork(dist.Work):
    """A call for which the host waits until it is done, whatever torch asks for. ``wait`` is the subclass's."""

    _results: list[torch.Tensor]

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._results


class PendingWork(HostWork):
    """A call that another thread finishes.

    Args:
        label: what it is, for error texts.
        results: what the future holds.
        may_wait: raises where waiting would never end.
        on_late: told the reason when a caller's own ``wait(timeout)`` has run out; it makes the group unusable.
    """

    def __init__(
        self,
        label: str,
        results: list[torch.Tensor],
        may_wait: Callable[[], None],
        on_late: Callable[[PeerTimeoutError], object],
    ) -> None:
        super().__init__()
        self._label = label
        self._results = results
        self._may_wait = may_wait
        self._on_late = on_late
        self._finished = False
        self._error: BaseException | None = None
        self._gate = threading.Lock()
        self._gate.acquire()
        self._future_lock = threading.Lock()
        self._base: Any = None
        self._future: Any = None

    def finish(self, error: BaseException | None = None) -> None:
        """Mark as done, wake who waits, and run the future's callbacks on this thread."""
        with self._future_lock:
            self._error = without_frames(error)
            self._finished = True
            base = self._base
        self._gate.release()
        if base is not None:
            base.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done. Ends: the call itself runs under the group's timeout.

        Raises:
            DetcommError: what the call ended with.
            PeerTimeoutError: not done within ``timeout``; the group is unusable afterwards.
        """
        if not self._finished:
            self._may_wait()
            limit_s = timeout.total_seconds() if timeout else 0.0
            if not self._gate.acquire(timeout=limit_s if limit_s > 0 else -1):
                late = PeerTimeoutError(f"{self._label}: not done within the {limit_s:g} s given to wait()")
                self._on_late(late)
                raise late
            self._gate.release()
        if self._error is not None:
            raise fresh(self._error) from self._error
        return True

    def is_completed(self) -> bool:
        return self._finished

    def is_success(self) -> bool:
        return self._finished and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of the results.

        Not ``Future.set_exception``: C++ readers of the future (DDP's Reducer) crash on a Python exception set so.
        An exception raised in a ``then`` callback reaches them as a C++ error.
        """
        with self._future_lock:
            if self._future is None:
                self._base = torch.futures.Future()
                self._future = self._base.then(self._unwrap)
                settled = self._finished
            else:
                settled = False
        if settled:
            self._base.set_result(None)
        return self._future

    def _unwrap(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise fresh(self._error) from self._error
        return self._results


def fresh(error: Raised) -> Raised:
    """A new exception of the same kind: one object raised in several threads would share its traceback."""
    try:
        return type(error)(*error.args)
    except TypeError:
        return error


def without_frames(error: BaseException | None) -> BaseException | None:
    """To be kept: ours say all in words, and a traceback would keep alive the group and the memory that it names."""
    return fresh(error) if isinstance(error, DetcommError) else error
