# SPDX-License-Identifier: Apache-2.0
"""A rank under the watch, for the tests of the watch itself: its membership, and its progress at hand."""

import os
import threading
import time
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from detcomm import store_access
from detcomm.faults import Fault
from detcomm.watch import Member, Membership, Progress, Watch

PATIENCE_S = 60.0
"""For a loaded machine; the times that were needed are printed."""


class Observer:
    """One rank's membership, with its progress at hand."""

    def __init__(self, rank: int, world_size: int, name: str = "watched", store: TCPStore | None = None) -> None:
        self.store = store or connect_store(world_size)
        self.num_started = 0
        self.num_completed = 0
        self.faults: list[Fault] = []
        self.is_told = threading.Event()
        space = store_access.group_key_space(PrefixStore(name, self.store), rank)
        space.set(f"member/{rank}", Member.own(space).encode())
        texts = store_access.read_all(space, [f"member/{peer}" for peer in range(world_size)], PATIENCE_S)
        members = [Member.decode(text) for text in texts if text is not None]
        assert len(members) == world_size, "a rank did not come"
        self.membership: Membership = Watch.enrol(
            name, space, rank, members, self._on_fault, lambda: Progress(self.num_started, self.num_completed)
        )

    def wait_for_fault(self, since: float) -> Fault:
        assert self.is_told.wait(PATIENCE_S), "no fault was told"
        print(f"told after {time.time() - since:.3f} s: {self.faults[0]}", flush=True)
        return self.faults[0]

    def _on_fault(self, fault: Fault) -> None:
        self.faults.append(fault)
        self.is_told.set()


def connect_store(world_size: int) -> TCPStore:
    return TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world_size, False, timedelta(seconds=PATIENCE_S))


def pass_barrier(store: TCPStore, name: str, world_size: int) -> None:
    """All ranks have come, except those that die on the way."""
    store.add(name, 1)
    deadline = time.monotonic() + PATIENCE_S
    while store.add(name, 0) < world_size:
        assert time.monotonic() < deadline
        time.sleep(0.005)
