# SPDX-License-Identifier: Apache-2.0
"""The watch over a group that is still being made: nobody waits long for a rank that failed or died on the way.

Connecting waits in places that cannot be woken (gloo's constructor, the store), so a thread does it, which is left
behind when a fault comes first. Knows nothing of what is connected.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed import Store

from detcomm.abandonable import Abandonable
from detcomm.errors import DetcommError, TransportError
from detcomm.faults import Fault
from detcomm.watch import Member, Membership, Progress, Watch

T = TypeVar("T")

_UNMADE = Progress(0, -1)
"""Whoever leaves before the group is made fails it, though nobody has called anything."""
_OWN_VERDICT_S = 0.5
"""How long a fault waits for this rank's own error: where all ranks raise alike, none should raise another's."""


class GroupCreation:
    """One rank's part in making a group; all ranks make one, after they have introduced themselves.

    Args:
        store: the group's own key space.
        members: what the ranks have told of themselves.

    Raises:
        PeerTimeoutError: a rank of another host did not come; names it.
    """

    def __init__(self, name: str, store: Store, rank: int, members: Sequence[Member], timeout_s: float) -> None:
        self._changed = threading.Event()
        self._handing_over = threading.Lock()
        self._fault: Fault | None = None
        self._on_fault: Callable[[Fault], None] | None = None
        self._progress: Callable[[], Progress] = lambda: _UNMADE
        self._membership = Watch.enrol(
            name, store, rank, members, self._receive_fault, lambda: self._progress(), timeout_s
        )

    def run(self, step: Callable[[], T], close: Callable[[T], None]) -> T:
        """Run a step that needs the other ranks.

        Args:
            step: called in a thread of its own.
            close: releases what the step made, if it ends after all when nobody wants it any more.

        Raises:
            TransportError: another rank failed or died meanwhile; names it. All ranks of the group raise.
            Exception: what the step raised. A ``TransportError`` is told to the other ranks and gives way to its
                cause.
        """
        started = Abandonable("detcomm-creation", step, close, self._changed)
        while not (started.has_ended or self._fault):
            self._changed.wait()
            self._changed.clear()
        if not started.has_ended:
            self._changed.wait(_OWN_VERDICT_S)
        if made := started.take_or_abandon():
            return made[0]
        raise self._cause(started.take_error())

    def hand_over(self, on_fault: Callable[[Fault], None], progress: Callable[[], Progress]) -> Membership:
        """The group is made, and answers for itself from now on."""
        with self._handing_over:
            self._on_fault, self._progress = on_fault, progress
            fault = self._fault
        if fault is not None:
            on_fault(fault)
        return self._membership

    def fail(self, error: BaseException) -> None:
        """Leave. The others are told, unless the error is one on which all ranks agree."""
        if isinstance(error, TransportError) or not isinstance(error, DetcommError):
            self._membership.report(error)
        self._membership.leave()

    def _cause(self, error: BaseException | None) -> BaseException:
        """What to raise: this rank's own error, unless it follows from a fault that came first."""
        if error is not None and not isinstance(error, TransportError):
            return error
        fault = self._fault if error is None else self._membership.report(error)
        assert fault is not None, "a step ends with a result, an error or a fault"
        # Where all ranks come to one verdict, the first report of it is no other cause.
        return error if error is not None and str(error) in fault.text else fault.to_error()

    def _receive_fault(self, fault: Fault) -> None:
        with self._handing_over:
            self._fault = fault
            on_fault = self._on_fault
        self._changed.set()
        if on_fault is not None:
            on_fault(fault)
