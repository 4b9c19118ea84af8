# SPDX-License-Identifier: Apache-2.0
"""A rank that dies or fails is named by all ranks of its groups, within about two seconds.

    membership = Watch.enrol(name, store, rank, members, on_fault, progress)
    membership.report(error)      # this rank saw an error: tell the others, learn the first cause
    membership.leave()            # in good order; the thread ends with the process's last membership

One thread per process watches over all its groups: processes of the same host end (pidfd), the connection to the next
host's first rank ends (lifeline), others tell of faults (the log in the store), the store ends with the process that
serves it. Then ``on_fault`` wakes whoever waits for the lost rank. Nobody is judged by slowness: a rank that is stopped
or stuck is found by the timeouts of those who wait for it.

Knows nothing of transports and process groups.
"""

import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any, ClassVar

from torch.distributed import Store

from detcomm import store_access
from detcomm.faults import Fault
from detcomm.line_ring import join_line_ring
from detcomm.watch_thread import LINGER_S, WatchThread
from detcomm.watched_group import Member, Progress, Report, WatchedGroup

__all__ = ["Fault", "Member", "Membership", "Progress", "Watch"]

_ANSWER_S = 3.0
"""How long a caller waits for the thread, which may be stuck in a store that does not answer."""


class Membership:
    """One rank's place in a watched group."""

    def __init__(self, thread: WatchThread, group: WatchedGroup) -> None:
        self._thread = thread
        self._group = group
        self._pid = os.getpid()
        self._leaving = threading.Lock()
        self._has_left = False
        self._is_stuck = False

    @property
    def fault(self) -> Fault | None:
        """The first fault of the group, once known here."""
        return self._group.fault

    def report(self, error: BaseException) -> Fault:
        """Tell the group of an error that makes it unusable. Returns within three seconds.

        Returns:
            The group's first fault, which may be the cause of this error.
        """
        if self._group.fault is None and not self._has_left:
            report = Report(self._group, error)
            self._thread.ask(lambda: self._thread.report(report))
            if not self._thread.is_current:
                self._is_stuck = not report.done.wait(_ANSWER_S)
        return self._group.fault or self._group.report(error)

    def leave(self) -> None:
        """Leave in good order. Idempotent; ends within a few seconds whatever the others do."""
        with self._leaving:
            if self._has_left or self._pid != os.getpid():
                return
            self._has_left = True
        num_completed = self._group.progress().num_completed
        done = threading.Event()
        self._thread.ask(lambda: self._thread.remove(self._group, num_completed, done))
        if not self._thread.is_current and not self._is_stuck:  # with a store that has vanished, nobody could be told
            done.wait(LINGER_S + _ANSWER_S)
        Watch.release(self)


class Watch:
    """This process's watch: made with its first membership, ended with its last."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _thread: ClassVar[WatchThread | None] = None
    _num_users: ClassVar[int] = 0
    _memberships: ClassVar[list[Membership]] = []
    _at_exit: ClassVar[Any] = None

    @classmethod
    def enrol(
        cls,
        group_name: str,
        store: Store,
        rank: int,
        members: Sequence[Member],
        on_fault: Callable[[Fault], None],
        progress: Callable[[], Progress],
        timeout_s: float = 300.0,
    ) -> Membership:
        """Watch over a group; all its ranks call this.

        Args:
            store: the group's own key space, see ``store_access.group_key_space``.
            members: what each rank has told of itself, by rank.
            on_fault: called once with the first fault, from the watch's thread; must return soon.
            progress: this rank's progress in the group; called from the watch's thread, at any time.
            timeout_s: how long to wait for the next host's rank.

        Raises:
            PeerTimeoutError: it did not come.
        """
        thread = cls._acquire()
        try:
            group = WatchedGroup.of(group_name, rank, members, on_fault, progress)
            line = join_line_ring(group, store, thread.listen, timeout_s)
        except BaseException:
            cls.release(None)
            raise
        thread.ask(lambda: thread.add(group, store_access.root_of(store), line))
        membership = Membership(thread, group)
        with cls._lock:
            cls._memberships.append(membership)
        return membership

    @classmethod
    def release(cls, membership: Membership | None) -> None:
        """End one use of the thread, and the thread with the last one."""
        with cls._lock:
            if membership is not None:
                cls._memberships.remove(membership)
            cls._num_users -= 1
            if cls._num_users > 0:
                return
            thread, cls._thread = cls._thread, None
        if thread is not None:
            thread.end(_ANSWER_S)

    @classmethod
    def _acquire(cls) -> WatchThread:
        with cls._lock:
            if cls._at_exit is None:
                # Not atexit's: the children of multiprocessing run none of it.
                cls._at_exit = Finalize(None, _leave_all, exitpriority=50)
            if cls._thread is None:
                cls._thread = WatchThread()
            cls._num_users += 1
            return cls._thread

    @classmethod
    def _after_fork(cls) -> None:
        """A child is no member of its parent's groups."""
        if cls._thread is not None:
            cls._thread.abandon()
        cls._lock = threading.Lock()
        cls._thread = None
        cls._num_users = 0
        cls._memberships = []
        cls._at_exit = None


def _leave_all() -> None:
    """A process that ends without destroying its groups leaves them in good order, as far as it got."""
    for membership in list(Watch._memberships):
        membership.leave()


os.register_at_fork(after_in_child=Watch._after_fork)
