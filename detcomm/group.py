# SPDX-License-Identifier: Apache-2.0
"""One process group on this rank: its reductions in order, its data movement, its failure, its end.

Behind the torch-named methods of both forms of the backend. Knows how to run and to fail, not what torch calls it.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from detcomm.coalescing import Block, BlockWork
from detcomm.communicator import Communicator
from detcomm.errors import PeerTimeoutError, TransportError, UsageError
from detcomm.faults import Fault
from detcomm.group_creation import GroupCreation
from detcomm.movement import Movement
from detcomm.options import Options
from detcomm.torch_calls import Batch
from detcomm.watch import Membership, Progress
from detcomm.work import FINISHED, FinishedWork, PendingWork
from detcomm.worker import Worker

DRAIN_S = 10.0
"""How long the destruction of a group waits for work in flight, before it is aborted."""

_JOIN_S = 5.0


class Group:
    """The parts of one group and their common fate.

    Args:
        inner: a connected stock gloo group, for all movement but all-gather.
        communicator: for reductions and all-gathers of CPU tensors; ``None`` in a group that has none of them.
    """

    def __init__(
        self, name: str, inner: Any, communicator: Communicator | None, options: Options, timeout: timedelta
    ) -> None:
        self.options = options
        self.name = name
        self.rank: int = inner.rank()
        self.world_size: int = inner.size()
        self.alone = self.world_size == 1
        """Whether reductions leave every bit as it is; not once the group has failed or is destroyed."""
        self.timeout_s = timeout.total_seconds()
        self._communicator = communicator
        self.movement = Movement(inner, self.lost)
        self._worker = Worker(self.name)
        self._membership: Membership | None = None
        self._num_started = 0
        self._num_completed = 0
        self._blocks: dict[int, Block] = {}
        self._failure: TransportError | None = None
        self._failing = threading.Lock()
        self._closed = False

    def join(self, creation: GroupCreation) -> None:
        """Have the process's watch tell this group of faults elsewhere, and the others of faults here."""
        self._membership = creation.hand_over(self._on_fault, self._progress)

    @property
    def sequence(self) -> int:
        """Agreements so far; equal on all ranks between calls."""
        return 0 if self._communicator is None else self._communicator.sequence

    def check_usable(self) -> None:
        """Refuse calls to a group that has failed or is destroyed.

        Raises:
            TransportError: with the first cause.
            UsageError: destroyed.
        """
        if self._failure is not None:
            raise TransportError(f"group {self.name} is unusable since an earlier error: {self._failure}")
        if self._closed:
            raise UsageError(f"group {self.name} has been destroyed")

    def reduce(self, name: str, batch: Batch, asynchronous: bool, timeout: timedelta | None) -> dist.Work:
        """Run a batch after all earlier ones: now, or on the group's thread, or at the end of an open block."""
        if self._failure is not None or self._closed:
            self.check_usable()
        timeout_s = self.timeout_s
        if timeout is not None and (own_s := timeout.total_seconds()) > 0:
            timeout_s = own_s
        if self._blocks and (block := self._blocks.get(threading.get_ident())) is not None:
            work = block.add(name, batch, timeout_s)
            return work if asynchronous else FINISHED
        if self.world_size == 1:
            self._execute(batch, timeout_s)
            return FinishedWork(batch.results) if asynchronous else FINISHED
        if not asynchronous:
            self._worker.run(partial(self._execute, batch, timeout_s))
            return FINISHED
        pending = PendingWork(name, batch.results, self.check_may_wait, self.late)
        self._worker.submit(partial(self._settle, batch, timeout_s, pending.finish))
        return pending

    def barrier(self, opts: Any, asynchronous: bool) -> dist.Work:
        """Every rank has come, and everything that was issued here before is done."""
        self.check_usable()
        job = partial(self._barrier, opts)
        if not asynchronous:
            self._worker.run(job)
            return FINISHED
        pending = PendingWork("barrier", [], self.check_may_wait, self.late)

        def settle() -> None:
            error: BaseException | None = None
            try:
                job()
            except BaseException as caught:
                error = caught
            pending.finish(error)

        self._worker.submit(settle)
        return pending

    def moved(self, work: dist.Work, collective: bool = True) -> dist.Work:
        """A movement that has been posted; an open block waits for it too.

        Args:
            collective: whether all ranks take part, as in all but sends and receives.
        """
        if collective:  # gloo carries it on even if this rank leaves
            self._num_started += 1
            self._num_completed += 1
        if self._blocks and (block := self._blocks.get(threading.get_ident())) is not None:
            block.works.append(work)
        return work

    def open_block(self) -> None:
        """Begin to coalesce on this thread."""
        self.check_usable()
        abandoned = self._blocks.pop(threading.get_ident(), None)
        if abandoned is not None:
            abandoned.abandon()
        self._blocks[threading.get_ident()] = Block(self.late)

    def close_block(self) -> dist.Work:
        """Run what this thread has issued since ``open_block``."""
        block = self._blocks.pop(threading.get_ident(), None)
        if block is None:
            raise UsageError(f"group {self.name}: no coalescing block is open on this thread")
        works = list(block.works)
        batch = block.close()
        if batch is not None:
            pending = PendingWork("coalesced block", batch.results, self.check_may_wait, self.late)

            def settle(error: BaseException | None = None) -> None:
                block.finish(error)
                pending.finish(error)

            self._worker.submit(partial(self._settle, batch, block.timeout_s, settle))
            works.append(pending)
        return BlockWork(works)

    def check_may_wait(self) -> None:
        """Refuse to wait inside a callback on the group's own thread for what runs after it."""
        if self._worker.nested:
            raise UsageError(f"group {self.name}: a callback of a future waits for a call that is queued behind it")

    def lost(self, error: TransportError) -> TransportError:
        """A peer is lost: the group becomes unusable on all ranks. The error to raise, with the first cause."""
        with self._failing:
            if self._failure is not None:
                return self._failure
            if self._closed:
                return error
        first = error
        if self._membership is not None:
            first = self._membership.report(error).to_error()
        self.fail(first)
        return self._failure or first

    def late(self, error: PeerTimeoutError) -> None:
        """A caller's own patience is over."""
        self.lost(error)

    def fail(self, error: TransportError) -> None:
        """Make the group unusable, and wake every thread that waits in it. From any thread."""
        with self._failing:
            if self._failure is not None or self._closed:
                return
            self._failure = error
            self.alone = False
        if self._communicator is not None:
            self._communicator.abort(str(error))
        if self.movement.inner is not None:
            self.movement.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """For the calls that come."""
        self.timeout_s = timeout.total_seconds()
        if self.movement.inner is not None:
            self.movement.inner._set_default_timeout(timeout)

    def abort(self) -> None:
        """Give up what runs, on all ranks; nothing can be called afterwards."""
        self.lost(TransportError(f"group {self.name} was aborted on rank {self.rank}"))
        self.shutdown()

    def shutdown(self) -> None:
        """Finish what is in flight, or abort it after ``DRAIN_S``; then release everything. Idempotent."""
        with self._failing:
            if self._closed:
                return
        patience_s = DRAIN_S if self._failure is None else _JOIN_S
        if not self._worker.stop(patience_s):
            self.fail(TransportError(f"group {self.name} was destroyed with work in flight on rank {self.rank}"))
            self._worker.stop(_JOIN_S)
        with self._failing:
            self._closed = True
            self.alone = False
        if self._membership is not None:
            self._membership.leave()
        if self._communicator is not None:
            self._communicator.close()
        self.movement.close()

    def _on_fault(self, fault: Fault) -> None:
        self.fail(fault.to_error())

    def _progress(self) -> Progress:
        return Progress(self._num_started, self._num_completed)

    def _execute(self, batch: Batch, timeout_s: float) -> None:
        if self._failure is not None:
            self.check_usable()
        if self._communicator is None:
            raise UsageError(f"group {self.name} reduces no CPU tensors")
        self._num_started += 1
        try:
            if batch.gather is not None:
                batch.gather()
            self._communicator.run_many(batch.requests, timeout_s=timeout_s)
            if batch.scatter is not None:
                batch.scatter()
        except TransportError as error:
            raise self.lost(error) from error
        finally:
            self._num_completed += 1

    def _barrier(self, opts: Any) -> None:
        self._num_started += 1
        try:
            self.movement.barrier(opts)
        finally:
            self._num_completed += 1

    def _settle(self, batch: Batch, timeout_s: float, finish: Callable[[BaseException | None], None]) -> None:
        error: BaseException | None = None
        try:
            self._execute(batch, timeout_s)
        except BaseException as caught:  # whoever waits gets it
            error = caught
        finish(error)
