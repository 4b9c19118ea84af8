# SPDX-License-Identifier: Apache-2.0
"""What a call on CUDA tensors returns: a ``Work`` whose ``wait`` orders streams and does not block the host."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from detcomm.cuda.events import Event
from detcomm.errors import PeerTimeoutError, UsageError

_POLL_S = 0.0005


class CudaWork(dist.Work):
    """A call that has been issued.

    Args:
        label: what it is, for error texts.
        results: what the future holds.
        done: behind the call on its stream.
        stream: that stream; the future's callbacks are ordered after it.
        kept: kept alive until the caller's stream waits for the call.
        check: raises if the group has failed.
        on_late: told when a caller's own ``wait(timeout)`` has run out.
        captured: whether the call is part of a graph; then nobody may ask whether it is done.
    """

    def __init__(
        self,
        label: str,
        results: list[torch.Tensor],
        done: Event,
        stream: torch.cuda.Stream,
        kept: list[Any],
        check: Callable[[], None],
        on_late: Callable[[PeerTimeoutError], None],
        captured: bool,
    ) -> None:
        super().__init__()
        self._label = label
        self._results = results
        self._done = done
        self._stream = stream
        self._kept = kept
        self._check = check
        self._on_late = on_late
        self._captured = captured
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait; with a timeout, as in stock NCCL, the host too.

        Raises:
            TransportError: the group has failed.
            PeerTimeoutError: not done within ``timeout``; the group is unusable afterwards.
        """
        self._check()
        current: int = torch._C._cuda_getCurrentRawStream(self._stream.device.index)
        self._done.make_wait(current)
        limit_s = timeout.total_seconds() if timeout else 0.0
        if limit_s > 0 and not self._captured:
            self._block(limit_s)
        if not self._captured:  # the current stream comes after the call now, and frees what is kept after it
            self._kept.clear()
        return True

    def is_completed(self) -> bool:
        if self._captured:
            raise UsageError(f"{self._label}: part of a graph that is captured; it runs when the graph is replayed")
        return self._done.is_done()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        try:
            self._check()
        except Exception as error:
            return error
        return None

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._results

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` that is done at once; who waits for it orders his streams after the call."""
        if self._future is None:
            future: Any = torch.futures.Future(devices=[self._stream.device])
            with torch.cuda.stream(self._stream):
                future.set_result(self._results)
            self._future = future
        return self._future

    def _block(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not self._done.is_done():
            self._check()
            if time.monotonic() > deadline:
                late = PeerTimeoutError(f"{self._label}: not done within the {limit_s:g} s given to wait()")
                self._on_late(late)
                raise late
            time.sleep(_POLL_S)
