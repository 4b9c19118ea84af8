# SPDX-License-Identifier: Apache-2.0
"""Reductions issued between ``_start_coalescing`` and ``_end_coalescing`` run when the block ends, after one agreement.

Each is still reduced by itself: merged into one message, their bits would depend on the grouping. Movement is posted
at once, and the block's work waits for it too. Knows batches and works; not how they are run.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from detcomm.errors import PeerTimeoutError, UsageError
from detcomm.torch_calls import Batch
from detcomm.work import PendingWork


class Block:
    """An open block of one thread."""

    def __init__(self, on_late: Callable[[PeerTimeoutError], object]) -> None:
        self.works: list[dist.Work] = []
        self.timeout_s = 0.0
        self._batches: list[Batch] = []
        self._pending: list[PendingWork] = []
        self._on_gpu: list[tuple[str, Batch, BlockedWork]] = []
        self._open = True
        self._on_late = on_late

    def add(self, name: str, batch: Batch, timeout_s: float) -> PendingWork:
        """Keep a reduction for the end of the block."""
        work = PendingWork(name, batch.results, self._check_closed, self._on_late)
        self._batches.append(batch)
        self._pending.append(work)
        self.timeout_s = max(self.timeout_s, timeout_s)
        return work

    def add_on_gpu(self, name: str, batch: Batch, timeout_s: float) -> "BlockedWork":
        """Keep a reduction of CUDA tensors for the end of the block."""
        work = BlockedWork(name)
        self._on_gpu.append((name, batch, work))
        self.timeout_s = max(self.timeout_s, timeout_s)
        return work

    @property
    def has_reductions_on_gpu(self) -> bool:
        return bool(self._on_gpu)

    def close(self) -> Batch | None:
        """End the block; all its reductions of CPU tensors as one batch, if there are any."""
        self._open = False
        return _as_one(self._batches) if self._batches else None

    def issue_on_gpu(self, issue: Callable[[Batch], dist.Work]) -> dist.Work | None:
        """Issue its reductions of CUDA tensors as one batch, if there are any."""
        if not self._on_gpu:
            return None
        whole = issue(_as_one([batch for _, batch, _ in self._on_gpu]))
        for _, _, work in self._on_gpu:
            work.issued = whole
        return whole

    def finish(self, error: BaseException | None) -> None:
        """Hand the outcome of the block to the works that its calls returned."""
        for work in self._pending:
            work.finish(error)

    def abandon(self) -> None:
        """Drop the block: its caller left it by an exception, and nothing was sent."""
        self.close()
        self.finish(UsageError("the coalescing block was left before its end; nothing was sent"))

    def _check_closed(self) -> None:
        if self._open:
            raise UsageError("wait() inside an open coalescing block would never return: its calls run at its end")


class BlockedWork(dist.Work):
    """A call on CUDA tensors inside an open block: it is issued at the block's end, and is that work from then on."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self._label = label
        self.issued: Any = None

    def _work(self) -> Any:
        if self.issued is None:
            raise UsageError(f"{self._label}: wait() inside an open coalescing block: its calls run at its end")
        return self.issued

    def wait(self, timeout: timedelta | None = None) -> bool:
        return bool(self._work().wait(timeout))

    def is_completed(self) -> bool:
        return self.issued is not None and bool(self.issued.is_completed())

    def is_success(self) -> bool:
        return self.issued is not None and bool(self.issued.is_success())

    def exception(self) -> Any:
        return self._work().exception()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self._work().result()

    def get_future(self) -> Any:
        return self._work().get_future()


class BlockWork(dist.Work):
    """All works of one block as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout) if timeout else work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((work.exception() for work in self._works if work.exception() is not None), None)

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Any:
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures.then(lambda done: [tensor for future in done.value() for tensor in future.value()])


def _as_one(batches: Sequence[Batch]) -> Batch:
    return Batch(
        requests=[request for batch in batches for request in batch.requests],
        results=[result for batch in batches for result in batch.results],
        tensors=[tensor for batch in batches for tensor in batch.tensors],
        gather=_in_turn([batch.gather for batch in batches]),
        scatter=_in_turn([batch.scatter for batch in batches]),
    )


def _in_turn(actions: Sequence[Callable[[], None] | None]) -> Callable[[], None] | None:
    known = [action for action in actions if action is not None]
    return partial(_run_all, known) if known else None


def _run_all(actions: Sequence[Callable[[], None]]) -> None:
    for action in actions:
        action()
