# SPDX-License-Identifier: Apache-2.0
"""Membership in watched groups: leaving in good order is no fault, except to those who wait in a later call."""

import os
import threading
import time

import pytest

from detcomm.watch import Watch
from tests import launch
from tests.multiprocess.watched_rank import PATIENCE_S, Observer, connect_store, pass_barrier


def depart_early(rank: int, world_size: int) -> str | None:
    observer = Observer(rank, world_size)
    observer.num_started = observer.num_completed = 3
    pass_barrier(observer.store, "enrolled", world_size)
    if rank == 1:
        observer.membership.leave()
        os._exit(3)
    since = time.time()
    observer.num_started += rank % 2  # rank 3 alone is in a further call
    if rank == 3:
        return observer.wait_for_fault(since).text
    time.sleep(1.5)  # no proof that nothing comes, but what comes wrongly comes within two ticks
    assert not observer.faults
    observer.num_started += 1
    return observer.wait_for_fault(since).text


def test_who_has_left_is_missed_only_by_later_calls() -> None:
    results = launch.run(4, depart_early, may_die=True)
    assert results[1] == launch.Died(3)
    for rank in (0, 2, 3):
        assert "rank 1 has left after 3 collective calls" in results[rank], results


def leave_at_the_end_of_the_process(rank: int, world_size: int) -> str | None:
    observer = Observer(rank, world_size)
    pass_barrier(observer.store, "enrolled", world_size)
    if rank == 1:
        observer.num_started = observer.num_completed = 5
        threading.Thread(target=_end_process_in_order, daemon=True).start()
        time.sleep(PATIENCE_S)
    observer.num_started = 5
    observer.num_completed = 5
    if rank == 2:
        observer.num_started = 6
        return observer.wait_for_fault(time.time()).text
    time.sleep(1.5)
    assert not observer.faults
    observer.membership.leave()
    return None


def _end_process_in_order() -> None:
    from multiprocessing import util

    util._exit_function()  # what a child of multiprocessing does before it ends
    os._exit(7)


def test_a_process_that_ends_in_order_leaves_its_groups() -> None:
    results = launch.run(3, leave_at_the_end_of_the_process, may_die=True)
    assert results[0] is None
    assert results[1] == launch.Died(7)
    assert "rank 1 has left after 5 collective calls" in results[2]


def end_with_the_store(rank: int, world_size: int) -> list[str]:
    """The rank that serves the store leaves first and ends, while the others are still in the last call."""
    observer = Observer(rank, world_size)
    observer.num_started = observer.num_completed = 1
    pass_barrier(observer.store, "enrolled", world_size)
    if rank == 0:
        time.sleep(0.3)  # the others pass the barrier through its store
        observer.membership.leave()
        os._exit(0)
    time.sleep(1.5)
    observer.membership.leave()
    return [fault.text for fault in observer.faults]


def test_the_server_of_the_store_may_leave_first() -> None:
    results = launch.run(4, end_with_the_store, may_die=True, store_host="rank0")
    assert results == [launch.Died(0), [], [], []]


def enrol_and_leave(rank: int, world_size: int, num_cycles: int) -> tuple[int, int, list[str]]:
    store = connect_store(world_size)

    def cycle() -> None:
        observer = Observer(rank, world_size, "cycle", store)
        observer.membership.leave()
        assert not observer.faults

    cycle()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(num_cycles):
        cycle()
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("detcomm")]
    return descriptors, len(os.listdir("/proc/self/fd")), names


@pytest.mark.parametrize(("hosts", "num_cycles"), [("aa", 30), ("ab", 15)])  # a leak of one a cycle shows at once
def test_nothing_is_left_after_many_cycles(hosts: str, num_cycles: int) -> None:
    env = [{"DETCOMM_HOST_ID": name} for name in hosts]
    for before, after, threads in launch.run(2, enrol_and_leave, num_cycles, env=env):
        assert after == before
        assert threads == []


def fork_a_child(rank: int, world_size: int) -> bool:
    """A child leaves nobody's groups, and keeps no line open."""
    observer = Observer(rank, world_size)
    observer.num_started = 1
    pass_barrier(observer.store, "enrolled", world_size)
    child = os.fork()
    if child == 0:
        observer.membership.leave()
        is_clean = Watch._thread is None and not Watch._memberships
        os._exit(0 if is_clean else 1)
    _, status = os.waitpid(child, 0)
    pass_barrier(observer.store, "forked", world_size)
    time.sleep(0.6)
    observer.membership.leave()
    return status == 0 and not observer.faults


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_forked_child_is_no_member(hosts: str) -> None:
    assert launch.run(2, fork_a_child, env=[{"DETCOMM_HOST_ID": name} for name in hosts]) == [True, True]
