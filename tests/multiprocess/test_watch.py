# SPDX-License-Identifier: Apache-2.0
"""The watch by itself, without any transport: who dies, fails or leaves is named by all the others."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from detcomm import store_access
from detcomm.errors import PeerTimeoutError, TransportError
from detcomm.faults import Fault, FaultKind
from detcomm.watch import Membership, Progress, Watch
from tests import launch

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
        self.membership: Membership = Watch.enrol(
            name, space, rank, world_size, self._on_fault, lambda: Progress(self.num_started, self.num_completed)
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


def see_a_death(rank: int, world_size: int, victim: int) -> tuple[str, str, bool, float]:
    observer = Observer(rank, world_size)
    pass_barrier(observer.store, "enrolled", world_size)
    since = time.time()
    if rank == victim:
        time.sleep(0.3)  # it may serve the store, through which the others pass the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    fault = observer.wait_for_fault(since + 0.3)
    took_s = time.time() - since - 0.3
    observer.membership.leave()
    return fault.kind, fault.text, observer.membership.fault is fault, took_s


@pytest.mark.parametrize("victim", range(4))
def test_a_death_is_named_by_all_others(victim: int) -> None:
    results = launch.run(4, see_a_death, victim, may_die=True)
    check_death(results, victim)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_on_another_host_is_named(victim: int) -> None:
    hosts = [{"DETCOMM_HOST_ID": f"host{rank}"} for rank in range(3)]
    results = launch.run(3, see_a_death, victim, env=hosts, may_die=True)
    check_death(results, victim)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_death_is_told_to_hosts_without_a_line_to_it(victim: int) -> None:
    # Rank 1 is seen by rank 0 alone; the others read of it. Rank 2 is alone on its host.
    hosts = [{"DETCOMM_HOST_ID": name} for name in ("a", "a", "b", "c", "d")]
    results = launch.run(5, see_a_death, victim, env=hosts, may_die=True)
    check_death(results, victim)


@pytest.mark.parametrize("env", [{}, {"DETCOMM_HOST_ID": "one"}])
def test_the_death_of_the_rank_that_serves_the_store(env: dict[str, str]) -> None:
    results = launch.run(4, see_a_death, 0, env=env, may_die=True, store_host="rank0")
    check_death(results, 0)


def test_the_death_of_the_rank_that_serves_the_store_on_another_host() -> None:
    hosts = [{"DETCOMM_HOST_ID": name} for name in ("a", "b", "b", "b")]
    results = launch.run(4, see_a_death, 0, env=hosts, may_die=True, store_host="rank0")
    check_death(results, 0)


def check_death(results: list[tuple[str, str, bool, float] | launch.Died], victim: int) -> None:
    assert results[victim] == launch.Died(-signal.SIGKILL)
    for rank, result in enumerate(results):
        if rank != victim:
            assert not isinstance(result, launch.Died), results
            kind, text, is_kept, took_s = result
            print(f"rank {rank} knew after {took_s:.3f} s: {text}")
            assert kind == FaultKind.DEATH
            assert f"rank {victim} died" in text, text
            assert is_kept


def report_an_error(rank: int, world_size: int) -> tuple[str, str]:
    observer = Observer(rank, world_size)
    pass_barrier(observer.store, "enrolled", world_size)
    since = time.time()
    if rank == 1:
        fault = observer.membership.report(TransportError("rank 1 lost rank 2: a cable"))
        assert fault == observer.wait_for_fault(since)
    fault = observer.wait_for_fault(since)
    observer.membership.leave()
    return fault.kind, fault.text


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
def test_an_error_is_told_to_all_and_all_know_the_same(hosts: str) -> None:
    results = launch.run(3, report_an_error, env=[{"DETCOMM_HOST_ID": name} for name in hosts])
    assert results == [(FaultKind.ERROR, "rank 1 reports: rank 1 lost rank 2: a cable")] * 3


def report_a_consequence(rank: int, world_size: int) -> str:
    """Rank 2 dies; the others report what they see of it at once, under another name."""
    observer = Observer(rank, world_size)
    pass_barrier(observer.store, "enrolled", world_size)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return observer.membership.report(TransportError(f"rank {rank} lost somebody")).text


def test_a_reported_error_gives_way_to_its_cause() -> None:
    results = launch.run(4, report_a_consequence, may_die=True)
    for rank in (0, 1, 3):
        assert "rank 2 died" in results[rank], results


def depart_early(rank: int, world_size: int, how: str) -> str | None:
    observer = Observer(rank, world_size)
    observer.num_started = observer.num_completed = 3
    pass_barrier(observer.store, "enrolled", world_size)
    if rank == 1:
        if how == "leave":
            observer.membership.leave()
        else:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
            signal.signal(signal.SIGUSR2, lambda *_: (_ for _ in ()).throw(SystemExit(3)))
            time.sleep(PATIENCE_S)
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
    results = launch.run(4, depart_early, "leave", may_die=True)
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


def stop_a_rank(rank: int, world_size: int) -> str:
    observer = Observer(rank, world_size)
    observer.store.set(f"pid{rank}", str(os.getpid()))
    pass_barrier(observer.store, "enrolled", world_size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return "woken"
    if rank == 0:
        pid = int(observer.store.get("pid1"))
        while "T" not in open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]:  # noqa: SIM115
            time.sleep(0.01)
        time.sleep(1.0)
        assert not observer.faults, "a stopped rank is not a dead one"
        observer.membership.report(PeerTimeoutError("rank 0 waited 1 s for rank 1"))
        os.kill(pid, signal.SIGCONT)
    return observer.wait_for_fault(time.time()).text


def test_a_stopped_rank_is_named_at_the_timeout() -> None:
    results = launch.run(3, stop_a_rank)
    expected = "rank 0 reports: rank 0 waited 1 s for rank 1 (rank 1: stopped by a signal)"
    assert results == [expected, "woken", expected]


def enrol_and_leave(rank: int, world_size: int, num_cycles: int) -> tuple[int, int, list[str]]:
    store = connect_store(world_size)

    def cycle(index: int) -> None:
        observer = Observer(rank, world_size, "cycle", store)
        other = Observer(rank, world_size, "other", store)
        observer.membership.leave()
        other.membership.leave()
        assert not observer.faults
        assert not other.faults

    cycle(0)
    descriptors = len(os.listdir("/proc/self/fd"))
    for index in range(num_cycles):
        cycle(index)
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("detcomm")]
    return descriptors, len(os.listdir("/proc/self/fd")), names


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_nothing_is_left_after_200_cycles(hosts: str) -> None:
    env = [{"DETCOMM_HOST_ID": name} for name in hosts]
    for before, after, threads in launch.run(2, enrol_and_leave, 200, env=env):
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


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(PeerTimeoutError, match="ranks 1, 2 of 3 did not come"):
        Watch.enrol("lonely", HashStore(), 0, 3, lambda fault: None, lambda: Progress(0, 0), timeout_s=0.2)
    assert Watch._thread is None
