# SPDX-License-Identifier: Apache-2.0
"""Sees the end of processes of this host, within milliseconds and without asking them anything.

Through pidfds, or by looking at /proc where the kernel has none. Knows nothing of ranks and groups.
"""

import os
from collections.abc import Callable, Collection
from selectors import EVENT_READ, BaseSelector

from detcomm.process_identity import ProcessIdentity


class ProcessEnds:
    """The processes watched through a selector, whose thread calls everything here.

    Args:
        on_end: called once with the name of a process that has ended.
    """

    def __init__(self, selector: BaseSelector, on_end: Callable[[str], None]) -> None:
        self._selector = selector
        self._on_end = on_end
        self._descriptors: dict[str, int] = {}
        self._polled: dict[str, ProcessIdentity] = {}
        self.ended: set[str] = set()
        """Names of processes that have been seen to end, here or by others."""

    def watch(self, process: ProcessIdentity) -> None:
        """Watch a process; one that has ended already is told of at once."""
        name = process.name
        if name in self._descriptors or name in self._polled:
            return
        try:
            descriptor = process.open_pidfd()
        except ProcessLookupError:
            self._end(name)
        except OSError:  # a kernel without pidfds
            self._polled[name] = process
        else:
            self._descriptors[name] = descriptor
            self._selector.register(descriptor, EVENT_READ, lambda: self._end(name))

    def poll(self) -> None:
        """Look at those that have no descriptor."""
        for name, process in list(self._polled.items()):
            if not process.is_running:
                self._end(name)

    def keep_only(self, names: Collection[str]) -> None:
        """Stop watching all others."""
        for name in (self._descriptors.keys() | self._polled.keys()) - set(names):
            self._forget(name)

    def abandon(self) -> None:
        """Close the descriptors without touching the selector, which is gone."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _end(self, name: str) -> None:
        self.ended.add(name)
        self._forget(name)
        self._on_end(name)

    def _forget(self, name: str) -> None:
        self._polled.pop(name, None)
        descriptor = self._descriptors.pop(name, None)
        if descriptor is not None:
            self._selector.unregister(descriptor)
            os.close(descriptor)
