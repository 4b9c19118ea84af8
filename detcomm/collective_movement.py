# SPDX-License-Identifier: Apache-2.0
"""Movement of CPU tensors in which all ranks take part: in one order with the group's reductions, and agreed on first.

So ranks that call different collectives, or the same with another root or size, all get the same ``MismatchError``, and
gloo never sees calls that do not match. Knows when to post to the stock group; not what is posted.
"""

from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from detcomm.errors import TransportError
from detcomm.lazy_communicator import LazyCommunicator
from detcomm.movement import Posting
from detcomm.movement_work import Lost, MovementWork
from detcomm.splits import agree_on_splits
from detcomm.worker import Worker


class CollectiveMovement:
    """One group's.

    Attributes:
        num_started: movements begun; completed ones are those that the stock group carries on even if this rank leaves.

    Args:
        communicator: over which the ranks agree; ``None`` in a group that asks nobody.
        worker: of the group, which keeps the order of its calls.
        check_usable: refuses calls to a group that has failed.
        check_may_wait: refuses to wait where it would never end.
        lost: makes the group unusable after an error of the transport; the error to raise.
    """

    def __init__(
        self,
        communicator: LazyCommunicator | None,
        worker: Worker,
        check_usable: Callable[[], None],
        check_may_wait: Callable[[], None],
        lost: Lost,
    ) -> None:
        self.num_started = 0
        self.num_completed = 0
        self._communicator = communicator
        self._worker = worker
        self._check_usable = check_usable
        self._check_may_wait = check_may_wait
        self._lost = lost

    def begin_now(self, posting: Posting) -> dist.Work:
        """A send or a receive, which waits for nothing that this rank has called before."""
        work = self._work_of(posting)
        work.begin(posting.post())
        return work

    def run(
        self, posting: Posting, asynchronous: bool, timeout_s: float, prepare: Callable[[], None] | None = None
    ) -> dist.Work:
        """Begin a movement of all ranks behind all earlier calls, once the ranks agree on it.

        Args:
            asynchronous: whether the caller goes on before it has begun.
            timeout_s: for the agreement.
            prepare: called first, in its turn.

        Raises:
            MismatchError: the ranks disagree; nothing was moved and the group stays usable. An asynchronous call's
                work raises it.
            TransportError: a peer is lost or late.
        """
        work = self._work_of(posting)
        job = partial(self._begin, posting, work, timeout_s, prepare)
        if asynchronous and (self._asks(posting) or prepare is not None or not self._worker.idle):
            self._worker.submit_and_tell(job, work.settle)
        else:
            self._worker.run(job)
        return work

    def _begin(
        self, posting: Posting, work: MovementWork, timeout_s: float, prepare: Callable[[], None] | None
    ) -> None:
        self._check_usable()
        self.num_started += 1
        try:
            if prepare is not None:
                prepare()
            if self._asks(posting):
                self._agree(posting, timeout_s)
            work.begin(posting.post())
        except TransportError as error:
            raise self._lost(error) from error
        finally:
            self.num_completed += 1

    def _asks(self, posting: Posting) -> bool:
        return posting.call is not None and self._communicator is not None

    def _agree(self, posting: Posting, timeout_s: float) -> None:
        assert posting.call is not None
        assert self._communicator is not None
        communicator = self._communicator.made
        if communicator is None:
            communicator, timeout_s = self._communicator.connect(timeout_s)
        if posting.splits is None:
            communicator.agree(posting.call, timeout_s=timeout_s)
        else:
            agree_on_splits(communicator, posting.call, posting.splits, timeout_s)

    def _work_of(self, posting: Posting) -> MovementWork:
        may_wait, finish = self._check_may_wait, posting.finish
        return MovementWork(posting.label, posting.results, self._lost, may_wait, finish, posting.waits)
