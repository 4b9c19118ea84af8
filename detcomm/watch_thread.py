# SPDX-License-Identifier: Apache-2.0
"""The watch's thread: it waits for ends of processes, ends of lines and entries of the log, and draws the conclusions.

All state is touched by this thread alone; others ask. Started and ended by ``watch.py``. It must not know transports,
nor wait for anything but the store: a store that does not answer (its server stopped) stops this thread too, and
then the timeouts of the calls are what is left.
"""

import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import Store

from detcomm.errors import TransportError
from detcomm.faults import Fault, FaultKind
from detcomm.lifeline import Endpoint, Lifelines
from detcomm.process_ends import ProcessEnds
from detcomm.request_queue import RequestQueue
from detcomm.watched_group import Report, WatchedGroup
from detcomm.watched_store import StoreLost, WatchedStore

_log = logging.getLogger("detcomm")

_TICK_S = 0.2
_POLLS_PER_S = 10_000
"""Larger worlds poll more slowly: at most so many polls of one store a second, of all ranks together."""
_LISTEN_S = 30.0
LINGER_S = 5.0
"""How long the process that serves the store waits, as it leaves, until the others know who has left."""


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
        self._requests = RequestQueue(self._selector)
        self._lines = Lifelines(self._selector, self._process_ended)
        self._processes = ProcessEnds(self._selector, self._process_ended)
        self._ends, self._next_reading = False, 0.0
        self._groups: dict[WatchedGroup, WatchedStore] = {}
        self._stores: dict[object, WatchedStore] = {}
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
        else:
            self._requests.put(request)

    def listen(self, addresses: tuple[str, ...]) -> Endpoint:
        """Accept lifelines.

        Raises:
            TransportError: the thread does not answer.
        """
        answer: queue.SimpleQueue[Endpoint] = queue.SimpleQueue()
        self.ask(lambda: answer.put(self._lines.listen(addresses)))
        try:
            return answer.get(timeout=_LISTEN_S)
        except queue.Empty:
            raise TransportError(f"detcomm's watch did not answer within {_LISTEN_S:g} s") from None

    def end(self, timeout_s: float) -> None:
        """End the thread and release everything that it holds."""
        self.ask(self._finish)
        if not self.is_current:
            self._thread.join(timeout_s)

    def abandon(self) -> None:
        """In a forked child, which has no such thread: release the descriptors without a word to the peers."""
        self._selector.close()
        self._requests.close()
        self._processes.abandon()
        for open_socket in self._lines.sockets():
            open_socket.close()

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
        for process in group.neighbours:
            self._processes.watch(process)

    def report(self, report: Report) -> None:
        """Write an error into the log, unless its cause turns up first."""
        self._next_reading = 0.0
        self._reports.append(report)

    def remove(self, group: WatchedGroup, num_completed: int, done: threading.Event) -> None:
        """Leave a group in good order; ``done`` is set when the process may go on, and end."""
        store = self._groups.pop(group, None)
        if store is None:
            done.set()
            return
        self._next_reading = 0.0
        self._lines.drop(group.key)
        own = group.own_process.name
        is_last = store not in self._groups.values()
        try:
            store.write_departure(group.key, group.rank, num_completed)
            if is_last:
                for server in store.servers:
                    store.acknowledge(server, own)
                if store.is_served_here and not store.all_acknowledged(own, store.members - self._processes.ended):
                    closing = Fault(FaultKind.CLOSING, own, group.rank, group.rank, "the store ends")
                    while not store.try_append(closing):
                        self._read_log(store)
                    self._lingers.append(_Linger(store, own, time.monotonic() + LINGER_S, done))
                    return
        except StoreLost:
            pass  # nobody is left who could read it
        self._forget(store, done)

    def _finish(self) -> None:
        self._ends = True

    # The thread.

    def _run(self) -> None:
        while not self._ends:
            try:
                for key, _ in self._selector.select(self._pause_s()):
                    key.data()
                self._requests.run_all()
                self._tick()
            except Exception:
                # Better a watch with a gap than none; what failed is told.
                _log.exception("detcomm's watch failed and goes on")
                time.sleep(_TICK_S)
        self._lines.close()
        self._processes.keep_only(())
        self._stores.clear()
        self._selector.close()
        self._requests.close()

    def _pause_s(self) -> float:
        if self._lingers:
            return 0.01
        num_ranks = max((len(group.processes) for group in self._groups), default=0)
        pauses_s = [max(report.deadline, report.group.verdict_at) - time.monotonic() for report in self._reports]
        return max(0.0, min([max(_TICK_S, num_ranks / _POLLS_PER_S), *pauses_s]))

    def _tick(self) -> None:
        if (now := time.monotonic()) >= self._next_reading:  # not at each of many groups that are made
            self._next_reading = now + _TICK_S / 2
            for store in {store for store in self._groups.values() if not store.is_lost}:
                self._read_log(store)
        self._processes.poll()
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
            self._read_departures(store, entry.group)  # a process's name, and so no group's key
        for group in [group for group in self._groups if group.key == entry.group]:
            if entry.kind is FaultKind.DEATH:  # seen on its own host; nobody need wait for its farewell
                self._processes.ended.add(group.processes[entry.rank].name)
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
        while not group.knows(fault) and not store.is_lost:
            try:
                store.try_append(fault)
            except StoreLost:
                self._lose_store(store)
            else:
                self._read_log(store)  # brings back what was written, by whomever
        if not group.knows(fault):
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
        self._processes.ended.add(name)
        for group, store in list(self._groups.items()):
            for rank in group.ranks_of(name):
                if group.is_settled(rank):
                    continue
                try:
                    num_completed = store.read_departure(group.key, rank)
                except StoreLost:
                    self._lose_store(store)
                    num_completed = None
                end = group.death(rank, "has ended") if num_completed is None else group.departure(rank, num_completed)
                self._publish(end, group, store)

    def _settle_reports(self) -> None:
        now = time.monotonic()
        for report in list(self._reports):
            store = self._groups.get(report.group)
            if store is not None and report.group.fault is None:
                if now < report.deadline:
                    continue
                self._publish(report.group.report(report.error), report.group, store)
                if report.group.fault is None:
                    continue  # a timeout, and others may follow
            self._reports.remove(report)
            report.done.set()

    def _settle_lingers(self) -> None:
        for linger in list(self._lingers):
            try:
                waits_for = linger.store.members - self._processes.ended
                if time.monotonic() < linger.deadline and not linger.store.all_acknowledged(linger.server, waits_for):
                    continue
            except StoreLost:
                pass
            self._lingers.remove(linger)
            self._forget(linger.store, linger.done)

    def _open_store(self, root: Store) -> WatchedStore:
        port = getattr(root, "port", None)
        key: object = id(root) if port is None else (getattr(root, "host", None), port)
        if key not in self._stores or self._stores[key].is_lost:
            self._stores[key] = WatchedStore(root)
        return self._stores[key]

    def _forget(self, store: WatchedStore, done: threading.Event) -> None:
        """Release what no group needs any more."""
        if store not in self._groups.values():
            self._stores = {key: other for key, other in self._stores.items() if other is not store}
        self._processes.keep_only({process.name for group in self._groups for process in group.neighbours})
        done.set()
