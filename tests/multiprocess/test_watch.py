# SPDX-License-Identifier: Apache-2.0
"""The watch by itself, without any transport: who dies, fails or stops is named by all the others."""

import contextlib
import os
import signal
import socket
import time

import pytest

from detcomm.errors import PeerTimeoutError, TransportError
from detcomm.faults import FaultKind
from tests import launch
from tests.multiprocess.watched_rank import Observer, pass_barrier


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
    """Rank 2 dies; the others report what they see of it at once: a connection that ends."""
    observer = Observer(rank, world_size)
    if rank == 2:
        server = socket.create_server(("127.0.0.1", 0))
        observer.store.set("port", str(server.getsockname()[1]))
        accepted = [server.accept() for _ in range(world_size - 1)]
        pass_barrier(observer.store, "connected", world_size)
        os.kill(os.getpid(), signal.SIGKILL)
        return f"outlived its own death, with {accepted}"
    with socket.create_connection(("127.0.0.1", int(observer.store.get("port")))) as connection:
        pass_barrier(observer.store, "connected", world_size)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    return observer.membership.report(TransportError(f"rank {rank} lost somebody")).text


def test_a_reported_error_gives_way_to_its_cause() -> None:
    results = launch.run(4, report_a_consequence, may_die=True)
    for rank in (0, 1, 3):
        assert "rank 2 died" in results[rank], results


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
