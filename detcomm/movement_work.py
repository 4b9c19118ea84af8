# SPDX-License-Identifier: Apache-2.0
"""What a movement over the stock gloo group returns: a work of gloo's, which may not have begun yet.

A movement of all ranks begins when they have agreed on it, on the group's thread; a send or a receive at once. Knows
nothing of how they agree.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from detcomm.errors import PeerTimeoutError, TransportError
from detcomm.movement_waits import MovementWaits
from detcomm.work import HostWork, fresh, without_frames

Lost = Callable[[TransportError], TransportError]
"""Told that the inner group has failed; gives the error to raise, which may name the first cause."""

_TIMEOUT_TEXTS = ("Timed out", "timed out", "timeout")


class MovementWork(HostWork):
    """A movement whose errors are ours.

    Args:
        label: what it is, for error texts.
        results: what the future holds.
        lost: told when the inner group fails in it.
        may_wait: raises where waiting for the begin would never end.
        finish: run once, when the bytes are there.
        waits: through which the inner work is waited for.
    """

    def __init__(
        self,
        label: str,
        results: list[torch.Tensor],
        lost: Lost,
        may_wait: Callable[[], None],
        finish: Callable[[], None] | None = None,
        waits: MovementWaits | None = None,
    ) -> None:
        super().__init__()
        self._label = label
        self._results = results
        self._lost = lost
        self._may_wait = may_wait
        self._finish = finish
        self._waits = waits
        self._inner: Any = None
        self._refusal: BaseException | None = None
        self._has_begun = threading.Lock()
        self._has_begun.acquire()
        self._lock = threading.Lock()
        self._base: Any = None
        self._future: Any = None
        self._is_settled = False
        self._failure: TransportError | None = None

    def begin(self, inner: Any) -> None:
        """It has been posted, as this work of the inner group."""
        with self._lock:
            self._inner = inner
            base = self._base
        self._has_begun.release()
        if base is not None:
            self._follow(inner.get_future())

    def settle(self, error: BaseException | None) -> None:
        """How the attempt to begin it ended: with an error it never will."""
        if error is None:
            return
        with self._lock:
            self._refusal = without_frames(error)
            base = self._base
        self._has_begun.release()
        if base is not None:
            self._settle_future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the bytes are there; at most for ``timeout``, or the group's.

        Raises:
            MismatchError: the ranks disagree on it; nothing was moved.
            TransportError, PeerTimeoutError: the group is unusable afterwards.
        """
        limit_s = timeout.total_seconds() if timeout else 0.0
        deadline = time.monotonic() + limit_s
        if self._inner is None:
            self._wait_for_begin(limit_s)
        try:
            if limit_s > 0:
                left_s = max(deadline - time.monotonic(), 0.001)  # gloo takes zero for its own default
                self._wait_for(partial(self._inner.wait, timedelta(seconds=left_s)))
            else:
                self._wait_for(self._inner.wait)
        except RuntimeError as error:
            raise self._lost(transport_error(self._label, error)) from error
        self._finish_once()
        return True

    def is_completed(self) -> bool:
        if self._inner is None:
            return self._refusal is not None
        if not self._inner.is_completed():
            return False
        if self._inner.is_success():
            self._finish_once()
        return True

    def is_success(self) -> bool:
        return self._inner is not None and bool(self._inner.is_success())

    def exception(self) -> Any:
        return self._refusal if self._inner is None else self._inner.exception()

    def get_future(self) -> Any:
        """As gloo: for collectives alone, not for send and receive."""
        with self._lock:
            if self._future is not None:
                return self._future
            inner, refusal = self._inner, self._refusal
            inner_future = None if inner is None else inner.get_future()
            self._base = torch.futures.Future()
            self._future = self._base.then(self._unwrap)
        if inner_future is not None:
            self._follow(inner_future)
        elif refusal is not None:
            self._settle_future()
        return self._future

    def source_rank(self) -> int:
        return int(self._inner._source_rank())

    def _source_rank(self) -> int:
        return self.source_rank()

    def _wait_for(self, wait: Callable[[], Any]) -> None:
        if self._waits is None or self._inner.is_completed():
            wait()
        else:
            self._waits.run(wait)

    def _wait_for_begin(self, limit_s: float) -> None:
        if self._refusal is None:
            self._may_wait()
            # Without a limit it ends as well: the agreement runs under the group's timeout.
            if not self._has_begun.acquire(timeout=limit_s if limit_s > 0 else -1):
                text = f"{self._label}: not begun by all ranks within the {limit_s:g} s given to wait()"
                raise self._lost(PeerTimeoutError(text))
            self._has_begun.release()
        if self._refusal is not None:
            raise fresh(self._refusal) from self._refusal

    def _follow(self, inner_future: Any) -> None:
        """gloo's future, or the failure of the group: whichever comes first. gloo may not tell before its timeout."""
        if self._waits is not None:
            self._waits.on_end(self._settle_future, self._inner.wait)
        inner_future.then(self._take_outcome)

    def _take_outcome(self, done: Any) -> None:
        """On gloo's thread, before its work counts as done: waiting for that here would never end."""
        if self._waits is not None:
            self._waits.forget(self._settle_future)
        error: TransportError | None = None
        try:
            done.value()
        except RuntimeError as failure:
            error = transport_error(self._label, failure)
        self._settle_future(error)

    def _settle_future(self, error: TransportError | None = None) -> None:
        with self._lock:
            if self._is_settled:
                return
            self._is_settled = True
            self._failure = error
        self._base.set_result(None)

    def _unwrap(self, _: Any) -> list[torch.Tensor]:
        error = self._refusal or self._failure
        if error is not None:
            raise fresh(error) from error
        self._finish_once()
        return self._results

    def _finish_once(self) -> None:
        with self._lock:
            if self._finish is not None:
                self._finish()
                self._finish = None


def transport_error(label: str, error: RuntimeError) -> TransportError:
    """What gloo says, as one of our errors."""
    text = str(error).partition("\n")[0]
    kind = PeerTimeoutError if any(word in text for word in _TIMEOUT_TEXTS) else TransportError
    return kind(f"{label}: {text}")
