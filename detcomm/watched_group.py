# SPDX-License-Identifier: Apache-2.0
"""One group as the watch sees it: which process each rank is, who has left, and the first fault.

Decides when a departure is a fault; knows neither threads nor sockets.
"""

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Self

from torch.distributed import Store

from detcomm import store_access
from detcomm.errors import PeerTimeoutError
from detcomm.faults import Fault, FaultKind
from detcomm.header import ranks_text
from detcomm.process_identity import ProcessIdentity

_log = logging.getLogger("detcomm")

_EVIDENCE_S = 0.5
"""How long a reported error waits for its cause: the connections of a dying process close before its end is seen."""
_TOGETHER_S = 0.5
"""How long after a first timeout others count as its company: a rank that is waited for may wait for the culprit."""
_MOST_TIMEOUTS = 8
"""Those that a message tells."""


@dataclass(frozen=True)
class Member:
    """What the ranks of a group tell each other for the watch's sake, before they enrol.

    Args:
        process: the process that the rank is.
        serves_store: whether that process serves the group's store.
        key: a random name for the group; that of rank 0 is taken.
    """

    process: ProcessIdentity
    serves_store: bool
    key: str

    @classmethod
    def own(cls, store: Store) -> Self:
        """This rank, in a group of this store."""
        return cls(ProcessIdentity.own(), store_access.serves(store), secrets.token_hex(8))

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        fields = json.loads(text)
        return cls(ProcessIdentity(**fields["process"]), fields["serves_store"], fields["key"])


@dataclass(frozen=True)
class Progress:
    """How far this rank is in a group: collective calls started and completed, of all kinds but send and receive."""

    num_started: int
    num_completed: int


@dataclass(eq=False)
class WatchedGroup:
    """The ranks of one group and what has become of them.

    Args:
        name: torch's name of the group, for messages.
        key: a name that no other group of the store has or had.
        rank: this process's rank.
        processes: each rank's process.
        store_server: the rank whose process serves the store; ``None`` if none of these does.
        on_fault: called once, from the watch's thread, with the first fault; must return soon.
        progress: this rank's progress; called from the watch's thread.
    """

    name: str
    key: str
    rank: int
    processes: tuple[ProcessIdentity, ...]
    store_server: int | None
    on_fault: Callable[[Fault], None]
    progress: Callable[[], Progress]
    fault: Fault | None = None
    departures: dict[int, Fault] = field(default_factory=dict)
    timeouts: dict[int, Fault] = field(default_factory=dict)
    verdict_at: float = 0.0

    @classmethod
    def of(
        cls,
        name: str,
        rank: int,
        members: Sequence[Member],
        on_fault: Callable[[Fault], None],
        progress: Callable[[], Progress],
    ) -> Self:
        """A group of these members, in rank order."""
        servers = [peer for peer, member in enumerate(members) if member.serves_store]
        return cls(
            name=name,
            key=members[0].key,
            rank=rank,
            processes=tuple(member.process for member in members),
            store_server=servers[0] if servers else None,
            on_fault=on_fault,
            progress=progress,
        )

    @property
    def own_process(self) -> ProcessIdentity:
        """This rank's process."""
        return self.processes[self.rank]

    @property
    def neighbours(self) -> set[ProcessIdentity]:
        """The other processes of this one's place: their end is seen here."""
        own = self.own_process
        return {process for process in self.processes if process.place == own.place and process != own}

    @property
    def leaders(self) -> list[int]:
        """The lowest rank of each place, in rank order."""
        first: dict[tuple[str, str], int] = {}
        for rank, process in enumerate(self.processes):
            first.setdefault(process.place, rank)
        return list(first.values())

    def ranks_of(self, process_name: str) -> list[int]:
        """The ranks that this process is; more than one where threads stand for ranks."""
        return [rank for rank, process in enumerate(self.processes) if process.name == process_name]

    def is_settled(self, rank: int) -> bool:
        """Whether nothing new can be learned of this rank."""
        return self.fault is not None or rank in self.departures or rank == self.rank

    def departure(self, rank: int, num_completed: int) -> Fault:
        """What is to be logged of a rank that left in good order."""
        when = f"after {num_completed} collective call{'' if num_completed == 1 else 's'}"
        if num_completed < 0:
            when = "before the group was made"
        text = f"group {self.name!r}: rank {rank} has left {when} ({self.processes[rank]})"
        return Fault(FaultKind.DEPARTURE, self.key, rank, self.rank, text, num_completed)

    def death(self, rank: int, evidence: str) -> Fault:
        """What is to be logged of a rank whose process ended without a word."""
        text = f"group {self.name!r}: rank {rank} died: {self.processes[rank]} {evidence}"
        return Fault(FaultKind.DEATH, self.key, rank, self.rank, text)

    def report(self, error: BaseException) -> Fault:
        """What is to be logged of an error that this rank saw."""
        stopped = [rank for rank, p in enumerate(self.processes) if p.place == self.own_process.place and p.is_stopped]
        note = f" ({ranks_text(stopped)}: stopped by a signal)" if stopped else ""
        kind = FaultKind.TIMEOUT if isinstance(error, PeerTimeoutError) else FaultKind.ERROR
        return Fault(kind, self.key, self.rank, self.rank, f"rank {self.rank} reports: {error}{note}")

    def knows(self, fault: Fault) -> bool:
        """Whether this entry, or one that counts more, has been learned."""
        known = {FaultKind.DEPARTURE: self.departures, FaultKind.TIMEOUT: self.timeouts}.get(fault.kind, {})
        return self.fault is not None or fault.rank in known

    def take(self, fault: Fault) -> None:
        """Learn an entry of the log. The first death or error counts; departures and timeouts are judged."""
        if fault.kind is FaultKind.DEPARTURE:
            self.departures.setdefault(fault.rank, fault)
            self.judge()
        elif self.fault is None and fault.kind is FaultKind.TIMEOUT:
            self.verdict_at = self.verdict_at or time.monotonic() + _TOGETHER_S
            self.timeouts.setdefault(fault.rank, fault)
        elif self.fault is None:
            self._fail(fault)

    def judge(self) -> None:
        """Whether a rank left before a call that this rank has started, which waits in vain; whether time is up."""
        if self.fault is None and self.departures:
            num_started = self.progress().num_started
            for departure in self.departures.values():
                if num_started > departure.num_completed:
                    self._fail(departure)
                    return
        if self.fault is None and self.timeouts and time.monotonic() >= self.verdict_at:
            self._fail(self._company())

    def _company(self) -> Fault:
        """All timeouts as one fault: who waits, and for whom, shows the rank for which all wait in the end."""
        first, *others = self.timeouts.values()
        texts = [fault.text for fault in (first, *others[: _MOST_TIMEOUTS - 1])]
        more = len(self.timeouts) - len(texts)
        return replace(first, text="; ".join(texts) + (f"; and {more} more ranks" if more else ""))

    def _fail(self, fault: Fault) -> None:
        self.fault = fault
        try:
            self.on_fault(fault)
        except Exception:
            # The watch goes on for the other groups; this one is lost either way.
            _log.exception("group %r: the answer to a fault failed: %s", self.name, fault)


@dataclass(eq=False)
class Report:
    """An error that this rank saw, on its way into the log."""

    group: WatchedGroup
    error: BaseException
    deadline: float = field(default_factory=lambda: time.monotonic() + _EVIDENCE_S)
    done: threading.Event = field(default_factory=threading.Event)
