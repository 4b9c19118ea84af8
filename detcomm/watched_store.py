# SPDX-License-Identifier: Apache-2.0
"""The watch's own connection to one store: the log of faults, departures, and who has read of the store's end.

Only the watch's thread uses it, so that no lock of the store's client can stop a rank. Every failure of the store is
``StoreLost``.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch.distributed import Store

from detcomm import store_access
from detcomm.faults import Fault, FaultLog

_DEPARTED = "detcomm/departed/"
_CLOSING = "detcomm/closing/"


class StoreLost(Exception):
    """The store does not answer: usually its server has ended."""


class WatchedStore:
    """One store, shared by all groups of this process that live in it.

    Args:
        root: the store below all prefixes.

    Raises:
        StoreLost: no connection.
    """

    def __init__(self, root: Store) -> None:
        with _failures():
            self._connection = store_access.own_connection(root)
        self._root = root
        self._log = FaultLog(self._connection)
        self.is_served_here = store_access.serves(root)
        self.is_lost = False
        self.members: set[str] = set()
        """Names of all processes that share a group with this one in this store, or did."""
        self.servers: set[str] = set()
        """Names of those of them that serve the store."""
        self._acknowledged: set[str] = set()

    def read_new(self) -> list[Fault]:
        """New entries of the log."""
        with self._failing():
            return list(self._log.read_new())

    def try_append(self, fault: Fault) -> bool:
        """See ``FaultLog.try_append``."""
        with self._failing():
            return self._log.try_append(fault)

    def write_departure(self, group_key: str, rank: int, num_completed: int) -> None:
        """Note that a rank leaves in good order."""
        with self._failing():
            self._connection.set(f"{_DEPARTED}{group_key}/{rank}", str(num_completed))

    def read_departure(self, group_key: str, rank: int) -> int | None:
        """The calls that a rank completed before it left in good order; ``None`` if it has not."""
        with self._failing():
            text = store_access.read(self._connection, f"{_DEPARTED}{group_key}/{rank}")
        return None if text is None else int(text)

    def acknowledge(self, server: str, own_name: str) -> None:
        """Tell the process that serves the store that this one does not need it any more."""
        if server not in self._acknowledged:
            self._acknowledged.add(server)
            with self._failing():
                self._connection.set(f"{_CLOSING}{server}/{own_name}", "")

    def all_acknowledged(self, server: str, names: Collection[str]) -> bool:
        """Whether all these processes do not need the store any more."""
        with self._failing():
            return not names or self._connection.check([f"{_CLOSING}{server}/{name}" for name in names])

    @contextmanager
    def _failing(self) -> Iterator[None]:
        if self.is_lost:
            raise StoreLost("the store is lost")
        try:
            with _failures():
                yield
        except StoreLost:
            self.is_lost = True
            raise


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what every error of torch's stores is
        raise StoreLost(str(error).partition("\n")[0]) from error
