# SPDX-License-Identifier: Apache-2.0
"""The watch's thread: it waits for ends of processes, ends of lines and entries of the log, and draws the conclusions.

All state is touched by this thread alone; others ask. Started and ended by ``watch.py``. It must not know transports,
nor wait for anything but the store: a store that does not answer (its server stopped) stops this thread too, and
then the timeouts of the calls are what is left.
"""

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch.distributed import Store

from detcomm.faults import Fault, FaultKind
from detcomm.lifeline import Endpoint, Lifelines
from detcomm.process_identity import ProcessIdentity
from detcomm.watched_group import WatchedGroup
from detcomm.watched_store import StoreLost, WatchedStore

_log = logging.getLogger("detcomm")

_TICK_S = 0.2
_POLLS_PER_S = 10_000
"""Larger worlds poll more slowly: at most so many polls of one store a second, from all ranks together."""
_EVIDENCE_S = 0.25
"""How long a reported error waits for its cause: the connections of a dying process close before its end is seen."""
LINGER_S = 2.0
"""How long the process that serves the store waits, as it leaves, until the others know who has left."""


@dataclass(eq=False)
class Report:
    """An error that this rank saw, on its way into the log."""

    group: WatchedGroup
    error: BaseException
    deadline: float = field(default_factory=lambda: time.monotonic() + _EVIDENCE_S)
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class _Linger:
    store: WatchedStore
    server: str
    deadline: float
    done: threading.Event


class WatchThread:
    """The thread and what it watches."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waking, self._woken = socket.socketpair()
        self._waking.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain_woken)
        self._lines = Lifelines(self._selector, self._process_ended)
        self._requests: list[Callable[[], None]] = []
        self._requesting = threading.Lock()
        self._ends = False

        self._groups: dict[WatchedGroup, WatchedStore] = {}
        self._stores: dict[object, WatchedStore] = {}
        self._pidfds: dict[str, int] = {}
        self._polled: dict[str, ProcessIdentity] = {}
        self._ended: set[str] = set()
        self._reports: list[Report] = []
        self._lingers: list[_Linger] = []
        self._thread = threading.Thread(target=self._run, name="detcomm-watch", daemon=True)
        self._thread.start()

    # For other threads.

    @property
    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def ask(self, request: Callable[[], None]) -> None:
        """Have something called by the thread, soon; at once where the caller is the thread."""
        if self.is_current:
            request()
            return
        with self._requesting:
            self._requests.append(request)
        with contextlib.suppress(OSError):  # full means that it will wake anyway
            self._waking.send(b"w")

    def listen(self, addresses: tuple[str, ...]) -> Endpoint:
        """Accept lifelines."""
        answer: list[Endpoint] = []
        done = threading.Event()

        def request() -> None:
            try:
                answer.append(self._lines.listen(addresses))
            finally:
                done.set()

        self.ask(request)
        done.wait()
        return answer[0]

    def end(self, timeout_s: float) -> None:
        """End the thread and release everything that it holds."""

        def request() -> None:
            self._ends = True

        self.ask(request)
        if not self.is_current:
            self._thread.join(timeout_s)

    def abandon(self) -> None:
        """In a forked child, which has no such thread: release the descriptors without a word to the peers."""
        self._selector.close()
        for open_socket in (self._waking, self._woken, *self._lines.sockets()):
            open_socket.close()
        for descriptor in self._pidfds.values():
            os.close(descriptor)

    # Requests: only through ``ask``.

    def add(self, group: WatchedGroup, root: Store, line: tuple[socket.socket, str] | None) -> None:
        """Watch a group."""
        store = self._open_store(root)
        self._groups[group] = store
        store.members |= {process.name for process in group.processes} - {group.own_process.name}
        if group.store_server is not None and group.store_server != group.rank:
            store.servers.add(group.processes[group.store_server].name)
        if line is not None:
            self._lines.add(*line, group.key)
        for name, process in group.neighbours.items():
            self._watch_process(name, process)

    def report(self, report: Report) -> None:
        """Write an error into the log, unless its cause turns up first."""
        self._reports.append(report)

    def remove(self, group: WatchedGroup, num_completed: int, done: threading.Event) -> None:
        """Leave a group in good order; ``done`` is set when the process may go on, and end."""
        store = self._groups.pop(group, None)
        if store is None:
            done.set()
            return
        self._lines.drop(group.key)
        own = group.own_process.name
        is_last = store not in self._groups.values()
        try:
            store.write_departure(group.key, group.rank, num_completed)
            if is_last:
                for server in store.servers:
                    store.acknowledge(server, own)
                if store.is_served_here and not store.all_acknowledged(own, store.members - self._ended):
                    closing = Fault(FaultKind.CLOSING, own, group.rank, group.rank, "the store ends")
                    while not store.try_append(closing):
                        self._read_log(store)
                    self._lingers.append(_Linger(store, own, time.monotonic() + LINGER_S, done))
                    return
        except StoreLost:
            pass  # nobody is left who could read it
        self._forget(store, done)

    # The thread.

    def _run(self) -> None:
        while not self._ends:
            try:
                for key, _ in self._selector.select(self._pause_s()):
                    key.data()
                self._run_requests()
                self._tick()
            except Exception:
                # Better a watch with a gap than none; what failed is told.
                _log.exception("detcomm's watch failed and goes on")
                time.sleep(_TICK_S)
        self._lines.close()
        for descriptor in self._pidfds.values():
            os.close(descriptor)
        self._stores.clear()
        self._selector.close()
        self._waking.close()
        self._woken.close()

    def _pause_s(self) -> float:
        if self._lingers:
            return 0.01
        largest = max((len(group.processes) for group in self._groups), default=0)
        pause_s = max(_TICK_S, largest / _POLLS_PER_S)
        now = time.monotonic()
        return max(0.0, min([pause_s] + [report.deadline - now for report in self._reports]))

    def _drain_woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass

    def _run_requests(self) -> None:
        with self._requesting:
            requests, self._requests = self._requests, []
        for request in requests:
            try:
                request()
            except Exception:
                _log.exception("detcomm's watch failed in a request and goes on")

    def _tick(self) -> None:
        for store in set(self._groups.values()):
            self._read_log(store)
        for name, process in list(self._polled.items()):
            if not process.is_running:
                self._process_ended(name)
        for group in list(self._groups):
            group.judge()
        self._settle_reports()
        self._settle_lingers()

    def _read_log(self, store: WatchedStore) -> None:
        try:
            entries = store.read_new()
        except StoreLost:
            self._lose_store(store)
            return
        for entry in entries:
            self._take(store, entry)

    def _take(self, store: WatchedStore, entry: Fault) -> None:
        if entry.kind is FaultKind.CLOSING:
            self._read_departures(store, entry.group)
            return
        for group in [group for group in self._groups if group.key == entry.group]:
            group.take(entry)

    def _read_departures(self, store: WatchedStore, server: str) -> None:
        """The store ends with this process: learn now from which groups it has left, then let it go."""
        own_name = ""
        try:
            for group in [group for group, its_store in self._groups.items() if its_store is store]:
                own_name = group.own_process.name
                for rank in group.ranks_of(server):
                    num_completed = store.read_departure(group.key, rank)
                    if num_completed is not None:
                        group.take(group.departure(rank, num_completed))
            if own_name and own_name != server:
                store.acknowledge(server, own_name)
        except StoreLost:
            self._lose_store(store)

    def _publish(self, fault: Fault, group: WatchedGroup, store: WatchedStore) -> None:
        """Write a fault into the log, unless the group has learned enough from what others wrote before."""

        def is_known() -> bool:
            return group.fault is not None or (fault.kind is FaultKind.DEPARTURE and fault.rank in group.departures)

        while not is_known() and not store.is_lost:
            try:
                store.try_append(fault)
            except StoreLost:
                self._lose_store(store)
            else:
                self._read_log(store)  # brings back what was written, by whomever
        if not is_known():
            group.take(fault)

    def _lose_store(self, store: WatchedStore) -> None:
        """The store has gone: the rank that serves it has died, unless it is known to have left."""
        for group in [group for group, its_store in self._groups.items() if its_store is store]:
            server = group.store_server
            if server is not None:
                if not group.is_settled(server):
                    group.take(group.death(server, "serves the store, and the store has gone"))
            elif group.fault is None:
                _log.warning("group %r: the store has gone; ranks of other hosts cannot be told of faults", group.name)

    def _process_ended(self, name: str) -> None:
        self._ended.add(name)
        self._unwatch_process(name)
        for group, store in list(self._groups.items()):
            for rank in group.ranks_of(name):
                if group.is_settled(rank):
                    continue
                try:
                    num_completed = store.read_departure(group.key, rank)
                except StoreLost:
                    self._lose_store(store)
                    num_completed = None
                if num_completed is None:
                    self._publish(group.death(rank, "has ended"), group, store)
                else:
                    self._publish(group.departure(rank, num_completed), group, store)

    def _settle_reports(self) -> None:
        now = time.monotonic()
        for report in list(self._reports):
            store = self._groups.get(report.group)
            if store is not None and report.group.fault is None:
                if now < report.deadline:
                    continue
                self._publish(report.group.report(report.error), report.group, store)
            self._reports.remove(report)
            report.done.set()

    def _settle_lingers(self) -> None:
        for linger in list(self._lingers):
            try:
                waits_for = linger.store.members - self._ended
                if time.monotonic() < linger.deadline and not linger.store.all_acknowledged(linger.server, waits_for):
                    continue
            except StoreLost:
                pass
            self._lingers.remove(linger)
            self._forget(linger.store, linger.done)

    def _open_store(self, root: Store) -> WatchedStore:
        port = getattr(root, "port", None)
        key: object = id(root) if port is None else (getattr(root, "host", None), port)
        if key not in self._stores:
            self._stores[key] = WatchedStore(root)
        return self._stores[key]

    def _forget(self, store: WatchedStore, done: threading.Event) -> None:
        """Release what no group needs any more."""
        if store not in self._groups.values():
            self._stores = {key: other for key, other in self._stores.items() if other is not store}
        needed = {name for group in self._groups for name in group.neighbours}
        for name in (self._pidfds.keys() | self._polled.keys()) - needed:
            self._unwatch_process(name)
        done.set()

    def _watch_process(self, name: str, process: ProcessIdentity) -> None:
        if name in self._pidfds or name in self._polled:
            return
        try:
            descriptor = process.open_pidfd()
        except ProcessLookupError:
            self._process_ended(name)
        except OSError:  # a kernel without pidfds
            self._polled[name] = process
        else:
            self._pidfds[name] = descriptor
            self._selector.register(descriptor, selectors.EVENT_READ, lambda: self._process_ended(name))

    def _unwatch_process(self, name: str) -> None:
        self._polled.pop(name, None)
        descriptor = self._pidfds.pop(name, None)
        if descriptor is not None:
            self._selector.unregister(descriptor)
            os.close(descriptor)
