# SPDX-License-Identifier: Apache-2.0
"""One process group on this rank: its reductions in order, its data movement, its failure, its end.

Behind the torch-named methods of both forms of the backend. Knows how to run and to fail, not what torch calls it.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from detcomm import text_agreement
from detcomm.coalescing import Block, BlockWork
from detcomm.collective_movement import CollectiveMovement
from detcomm.direct_calls import DirectCalls
from detcomm.errors import TransportError, UsageError
from detcomm.group_creation import GroupCreation
from detcomm.lazy_communicator import LazyCommunicator
from detcomm.lazy_cuda import LazyCuda
from detcomm.movement import Movement, Posting
from detcomm.options import Options
from detcomm.splits import Splits
from detcomm.torch_calls import Batch
from detcomm.watch import Membership, Progress
from detcomm.work import FINISHED, FinishedWork, PendingWork, fresh
from detcomm.worker import Worker

DRAIN_S = 10.0
"""How long the destruction of a group waits for work in flight, before it is aborted."""

_JOIN_S = 5.0


class Group:
    """The parts of one group and their common fate.

    Args:
        inner: a connected stock gloo group, for all movement but all-gather.
        communicator: for reductions and all-gathers of CPU tensors; ``None`` in a group that has none of them.
        make_cuda: makes the half for CUDA tensors when the first one comes.
    """

    def __init__(
        self,
        name: str,
        inner: Any,
        communicator: LazyCommunicator | None,
        options: Options,
        timeout: timedelta,
        make_cuda: Callable[["Group"], Any] | None = None,
    ) -> None:
        self.options = options
        self.name = name
        self.rank: int = inner.rank()
        self.world_size: int = inner.size()
        self.timeout_s = timeout.total_seconds()
        self._communicator = communicator
        self.movement = Movement(inner, self.lost)
        self._agrees_on_gpu = options.cuda_agreement == "on" and self.world_size > 1
        self.cuda = LazyCuda(name, None if make_cuda is None else partial(make_cuda, self), not self._agrees_on_gpu)
        self._worker = Worker(self.name)
        self._membership: Membership | None = None
        self._num_started = 0
        self._num_completed = 0
        self._blocks: dict[int, Block] = {}
        asked = communicator if self.world_size > 1 else None
        self._movements = CollectiveMovement(asked, self._worker, self.check_usable, self.check_may_wait, self.lost)
        self.direct = DirectCalls(self.world_size, self._worker, self._blocks, communicator, self.lost, self.cuda)
        self.failure: TransportError | None = None
        self._failing = threading.Lock()
        self._closed = False

    def join(self, creation: GroupCreation) -> None:
        """Have the process's watch tell this group of faults elsewhere, and the others of faults here."""
        self._membership = creation.hand_over(lambda fault: self.fail(fault.to_error()), self._progress)

    @property
    def sequence(self) -> int:
        """Agreements so far; equal on all ranks between calls."""
        return (0 if self._communicator is None else self._communicator.sequence) + self.cuda.sequence

    def movement_of(self, tensors: Sequence[torch.Tensor]) -> Movement:
        """What moves these tensors."""
        if not tensors or not tensors[0].is_cuda:
            return self.movement
        return self.cuda.movement(tensors[0].device, threading.get_ident() in self._blocks)

    def check_usable(self) -> None:
        """Refuse calls to a group that has failed or is destroyed.

        Raises:
            TransportError: with the first cause.
            UsageError: destroyed.
        """
        if self.failure is not None:
            raise TransportError(f"group {self.name} is unusable since an earlier error: {self.failure}")
        if self._closed:
            raise UsageError(f"group {self.name} has been destroyed")

    def reduce(self, name: str, batch: Batch, asynchronous: bool, timeout: timedelta | None) -> dist.Work:
        """Run a batch after all earlier ones: now, or on the group's thread, or at the end of an open block."""
        if self.failure is not None or self._closed:
            self.check_usable()
        timeout_s = self._timeout_s(timeout)
        if batch.tensors and batch.tensors[0].is_cuda:
            return self._reduce_on_gpu(name, batch, asynchronous, timeout_s)
        if self._blocks and (block := self._blocks.get(threading.get_ident())) is not None:
            work = block.add(name, batch, timeout_s)
            return work if asynchronous else FINISHED
        if self.world_size == 1:
            self._execute(batch, timeout_s)
            return FinishedWork(batch.results) if asynchronous else FINISHED
        if not asynchronous:
            self._worker.run(partial(self._execute, batch, timeout_s))
            return FINISHED
        pending = PendingWork(name, batch.results, self.check_may_wait, self.lost)
        self._worker.submit_and_tell(partial(self._execute, batch, timeout_s), pending.finish)
        return pending

    def move(self, posting: Posting, opts: Any) -> dist.Work:
        """Move data between all ranks: behind all earlier calls, once the ranks agree; an open block waits for it.

        Args:
            opts: torch's options object: whether the caller goes on before it has begun, and the call's own timeout.
        """
        if posting.on_gpu:
            call = posting.call
            said = None if call is None else lambda: (call.text(), posting.splits)
            return self._in_block(self._issue_on_gpu(posting.post, said))
        asynchronous, timeout_s = getattr(opts, "asyncOp", True), self._timeout_s(getattr(opts, "timeout", None))
        return self._in_block(self._movements.run(posting, asynchronous, timeout_s))

    def move_between_two(self, posting: Posting) -> dist.Work:
        """A send or a receive, which is posted at once."""
        return self._in_block(posting.post() if posting.on_gpu else self._movements.begin_now(posting))

    def barrier(self, opts: Any) -> dist.Work:
        """Every rank has come, and everything that was issued here before is done."""
        self.check_usable()
        timeout_s = self._timeout_s(opts.timeout)
        prepare = partial(self.cuda.synchronize, timeout_s)
        return self._movements.run(self.movement.barrier(opts), getattr(opts, "asyncOp", False), timeout_s, prepare)

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """As gloo's, in its turn; the ranks do not agree on it before, since it tells itself who has not come."""
        self.check_usable()
        self._worker.run(partial(self.movement.inner.monitored_barrier, timeout, wait_all_ranks))

    def _in_block(self, work: dist.Work) -> dist.Work:
        if self._blocks and (block := self._blocks.get(threading.get_ident())) is not None:
            block.works.append(work)
        return work

    def open_block(self) -> None:
        """Begin to coalesce on this thread."""
        self.check_usable()
        abandoned = self._blocks.pop(threading.get_ident(), None)
        if abandoned is not None:
            abandoned.abandon()
        self._blocks[threading.get_ident()] = Block(self.lost)

    def close_block(self) -> dist.Work:
        """Run what this thread has issued since ``open_block``."""
        block = self._blocks.pop(threading.get_ident(), None)
        if block is None:
            raise UsageError(f"group {self.name}: no coalescing block is open on this thread")
        works = list(block.works)
        works += self.cuda.close_block(
            block, lambda batch: self._reduce_on_gpu("coalesced block", batch, True, block.timeout_s)
        )
        batch = block.close()
        if batch is not None:
            pending = PendingWork("coalesced block", batch.results, self.check_may_wait, self.lost)

            def settle(error: BaseException | None = None) -> None:
                block.finish(error)
                pending.finish(error)

            self._worker.submit_and_tell(partial(self._execute, batch, block.timeout_s), settle)
            works.append(pending)
        return works[0] if len(works) == 1 else BlockWork(works)

    def check_may_wait(self) -> None:
        """Refuse to wait inside a callback on the group's own thread for what runs after it."""
        if self._worker.nested:
            raise UsageError(f"group {self.name}: a callback of a future waits for a call that is queued behind it")

    def lost(self, error: TransportError) -> TransportError:
        """A peer is lost: the group becomes unusable on all ranks. The error to raise, with the first cause."""
        with self._failing:
            if self.failure is not None:
                return fresh(self.failure)
            if self._closed:
                return error
        first = error
        if self._membership is not None:
            first = self._membership.report(error).to_error()
        self.fail(first)
        return fresh(self.failure or first)

    def fail(self, error: TransportError) -> None:
        """Make the group unusable, and wake every thread that waits in it. From any thread."""
        with self._failing:
            if self.failure is not None or self._closed:
                return
            self.failure = fresh(error)  # not to be raised itself: its traceback would keep the group
        self.direct.close()
        if self._communicator is not None:
            self._communicator.abort(str(error))
        if self.movement.inner is not None:
            self.movement.abort(error)
        self.cuda.fail(error)  # last: it may end the process

    def set_timeout(self, timeout: timedelta) -> None:
        """For the calls that come."""
        self.timeout_s = timeout.total_seconds()
        if self.movement.inner is not None:
            self.movement.inner._set_default_timeout(timeout)

    def abort(self) -> None:
        """Give up what runs, on all ranks; nothing can be called afterwards."""
        self.cuda.keep_process()
        self.lost(TransportError(f"group {self.name} was aborted on rank {self.rank}"))
        self.shutdown()

    def shutdown(self) -> None:
        """Finish what is in flight, or abort it after ``DRAIN_S``; then release everything. Idempotent."""
        with self._failing:
            if self._closed:
                return
        patience_s = DRAIN_S if self.failure is None else _JOIN_S
        if not self._worker.stop(patience_s):
            self.fail(TransportError(f"group {self.name} was destroyed with work in flight on rank {self.rank}"))
            self._worker.stop(_JOIN_S)
        self.cuda.keep_process()
        if not self.cuda.close(patience_s):
            self.fail(TransportError(f"group {self.name} was destroyed with work on the GPU of rank {self.rank}"))
        with self._failing:
            self._closed = True
        self.direct.close()
        if self._membership is not None:
            self._membership.leave()
        if self._communicator is not None:
            self._communicator.close()
        self.movement.close()

    def _progress(self) -> Progress:
        others = (self.direct, self._movements)
        num_started = self._num_started + sum(other.num_started for other in others)
        return Progress(num_started, self._num_completed + sum(other.num_completed for other in others))

    def _execute(self, batch: Batch, timeout_s: float) -> None:
        if self.failure is not None:
            self.check_usable()
        if self._communicator is None:
            raise UsageError(f"group {self.name} reduces no CPU tensors")
        self._num_started += 1
        try:
            if batch.gather is not None:
                batch.gather()
            communicator = self._communicator.made
            if communicator is None:
                communicator, timeout_s = self._communicator.connect(timeout_s)
            communicator.run_many(batch.requests, timeout_s=timeout_s)
            if batch.scatter is not None:
                batch.scatter()
        except TransportError as error:
            raise self.lost(error) from error
        finally:
            self._num_completed += 1

    def _reduce_on_gpu(self, name: str, batch: Batch, asynchronous: bool, timeout_s: float) -> dist.Work:
        if self._blocks and (block := self._blocks.get(threading.get_ident())) is not None:
            work = block.add_on_gpu(name, batch, timeout_s)
            return work if asynchronous else FINISHED
        issue = partial(self.cuda.reduce, name, batch, asynchronous, timeout_s)
        return self._issue_on_gpu(issue, lambda: (batch.text, None))

    def _issue_on_gpu(
        self, issue: Callable[[], dist.Work], said: Callable[[], tuple[str, Splits | None]] | None
    ) -> dist.Work:
        """Issue a collective to the current stream; by option the hosts agree on what is said before, in their turn."""
        self._num_started += 1
        try:
            if self._agrees_on_gpu and said is not None:
                self._worker.run(partial(text_agreement.agree, self.movement.inner, *said()))
            return issue()
        except TransportError as error:
            raise self.lost(error) from error
        finally:
            self._num_completed += 1

    def _timeout_s(self, own: timedelta | None) -> float:
        """A call's own timeout, or the group's."""
        return own_s if own is not None and (own_s := own.total_seconds()) > 0 else self.timeout_s
