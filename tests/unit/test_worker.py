# SPDX-License-Identifier: Apache-2.0
"""The order of a group's calls: what queues, what runs inline, what nests, how it ends."""

import threading

import pytest

from detcomm.errors import UsageError
from detcomm.worker import Worker

PATIENCE_S = 60.0


def _pass(gate: threading.Event) -> None:
    assert gate.wait(PATIENCE_S)


def test_an_idle_worker_runs_a_synchronous_call_on_the_callers_thread() -> None:
    worker = Worker("test")
    threads: list[int] = []
    worker.run(lambda: threads.append(threading.get_ident()))
    assert threads == [threading.get_ident()]
    assert worker.idle


def test_calls_run_one_at_a_time_in_the_order_of_their_making() -> None:
    worker = Worker("test")
    gate = threading.Event()
    order: list[int] = []
    worker.submit(lambda: order.append(0) if gate.wait(PATIENCE_S) else None)
    for number in range(1, 50):
        worker.submit(lambda number=number: order.append(number))
    assert not worker.idle
    gate.set()
    worker.run(lambda: order.append(50))
    assert order == list(range(51))
    assert worker.stop(PATIENCE_S)


def test_a_synchronous_call_raises_what_it_raises_inline_and_queued() -> None:
    worker = Worker("test")

    def fail() -> None:
        raise UsageError("from the job")

    with pytest.raises(UsageError, match="from the job"):
        worker.run(fail)
    gate = threading.Event()
    worker.submit(lambda: _pass(gate))
    threading.Timer(0.05, gate.set).start()
    with pytest.raises(UsageError, match="from the job"):
        worker.run(fail)
    ran: list[bool] = []
    worker.run(lambda: ran.append(True))
    assert ran == [True]
    assert worker.stop(PATIENCE_S)


def test_a_nested_call_runs_right_behind_its_own_job() -> None:
    worker = Worker("test")
    gate = threading.Event()
    order: list[str] = []

    def first() -> None:
        gate.wait(PATIENCE_S)
        order.append("first")
        assert worker.nested
        worker.run(lambda: order.append("nested"))
        worker.submit(lambda: order.append("nested too"))

    worker.submit(first)
    worker.submit(lambda: order.append("second"))
    gate.set()
    worker.run(lambda: None)
    assert order == ["first", "nested", "nested too", "second"]
    assert not worker.nested
    assert worker.stop(PATIENCE_S)


def test_synchronous_calls_of_many_threads_exclude_each_other() -> None:
    worker = Worker("test")
    inside = 0
    most = 0
    total = 0

    def job() -> None:
        nonlocal inside, most, total
        inside += 1
        most = max(most, inside)
        total += 1
        inside -= 1

    def drive() -> None:
        for number in range(200):
            (worker.run if number % 3 else worker.submit)(job)

    threads = [threading.Thread(target=drive) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert worker.stop(PATIENCE_S)
    assert (most, total) == (1, 800)


def test_a_stopped_worker_finishes_its_queue_and_takes_no_more() -> None:
    worker = Worker("test")
    done: list[int] = []
    for number in range(5):
        worker.submit(lambda number=number: done.append(number))
    assert worker.stop(PATIENCE_S)
    assert worker.stop(PATIENCE_S)
    assert done == [0, 1, 2, 3, 4]
    with pytest.raises(UsageError, match="destroyed"):
        worker.submit(lambda: None)


def test_stopping_gives_up_on_a_job_that_does_not_end() -> None:
    worker = Worker("test")
    gate = threading.Event()
    worker.submit(lambda: _pass(gate))
    assert not worker.stop(0.05)
    gate.set()
    assert worker.stop(PATIENCE_S)
