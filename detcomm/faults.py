# SPDX-License-Identifier: Apache-2.0
"""What ends a group, and the log of it in the store: every process reads the same entries in the same order.

So all ranks of a group name the same first cause. Knows nothing of processes, threads or transports.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum

from torch.distributed import Store

from detcomm import store_access
from detcomm.errors import PeerTimeoutError, TransportError

_LOG = "detcomm/faults/"


class FaultKind(StrEnum):
    """How a rank failed its group."""

    ERROR = "error"
    """It saw an error itself, and told."""
    TIMEOUT = "timeout"
    """It lost patience with its peers, and told."""
    DEATH = "death"
    """Its process ended without a word."""
    DEPARTURE = "departure"
    """It left in good order, after fewer calls than others have started."""
    CLOSING = "closing"
    """No fault: its process is about to end the store, and waits until everybody has read who left before."""


@dataclass(frozen=True)
class Fault:
    """One entry of the log.

    Args:
        kind: how.
        group: the group's unique name, or a process's for ``CLOSING``.
        rank: who failed; the reporter itself for ``ERROR`` and ``TIMEOUT``.
        reporter: who noticed.
        text: the whole message, which names the ranks.
        num_completed: calls that a departed rank has completed; a rank in a later call waits in vain.
    """

    kind: FaultKind
    group: str
    rank: int
    reporter: int
    text: str
    num_completed: int = 0

    def __str__(self) -> str:
        return self.text

    def to_error(self) -> TransportError:
        """What a call raises because of it, with the same text on every rank."""
        return PeerTimeoutError(self.text) if self.kind is FaultKind.TIMEOUT else TransportError(self.text)


class FaultLog:
    """The log in one store; append-only, without gaps. One thread uses it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next = 0

    def read_new(self) -> Iterator[Fault]:
        """Entries that have not been read through this object, in order."""
        while (text := store_access.read(self._store, f"{_LOG}{self._next}")) is not None:
            self._next += 1
            yield _decode(text)

    def try_append(self, fault: Fault) -> bool:
        """Write an entry behind those read so far; false if another was quicker, which is to be read first."""
        text = json.dumps(asdict(fault))
        # A place in the log is taken in one operation, so that a writer who dies in between leaves no gap.
        return self._store.compare_set(f"{_LOG}{self._next}", "", text).decode() == text


def _decode(text: str) -> Fault:
    fields = json.loads(text)
    return Fault(**fields | {"kind": FaultKind(fields["kind"])})
