# SPDX-License-Identifier: Apache-2.0
"""A failure of the group ends its waits; threads are used again, and none stays when the group has gone."""

import threading
import time
import weakref

import pytest

from detcomm.errors import TransportError
from detcomm.movement_waits import MovementWaits

PATIENCE_S = 60.0


def _wait_until_no_thread_of(name: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(thread.name == name for thread in threading.enumerate()):
        assert time.monotonic() < deadline, f"a thread {name} is left"
        time.sleep(0.01)


def test_one_thread_serves_waits_that_follow_each_other() -> None:
    waits = MovementWaits("test-one", None)
    seen: set[int] = set()
    for _ in range(5):
        waits.run(lambda: seen.add(threading.get_ident()))
    assert len(seen) == 1
    assert threading.get_ident() not in seen
    waits.close()
    _wait_until_no_thread_of("test-one")


def test_an_error_of_a_wait_comes_out_and_the_next_one_runs() -> None:
    waits = MovementWaits("test-error", None)

    def fail() -> None:
        raise RuntimeError("gloo says no")

    with pytest.raises(RuntimeError, match="gloo says no"):
        waits.run(fail)
    done: list[int] = []
    waits.run(lambda: done.append(1))
    assert done == [1]
    waits.close()
    _wait_until_no_thread_of("test-error")


def test_a_failure_ends_the_waits_of_all_threads_and_those_to_come() -> None:
    class Group:
        pass

    group = Group()
    waits, group_left = MovementWaits("test-failure", group), weakref.ref(group)
    del group
    release = threading.Event()
    started = threading.Barrier(4)
    texts: list[str] = []

    def stuck() -> None:
        started.wait(PATIENCE_S)
        release.wait(PATIENCE_S)

    def wait() -> None:
        try:
            waits.run(stuck)
        except TransportError as error:
            texts.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait(PATIENCE_S)
    waits.end(TransportError("rank 1 died"))
    waits.end(TransportError("a later one"))
    for thread in threads:
        thread.join(PATIENCE_S)
    assert texts == ["rank 1 died"] * 3
    with pytest.raises(TransportError, match="rank 1 died"):
        waits.run(lambda: None)
    assert group_left() is not None, "freed while its threads are in it"
    release.set()
    _wait_until_no_thread_of("test-failure")
    assert group_left() is None


def test_a_wait_that_begins_after_the_group_is_destroyed_is_served() -> None:
    waits = MovementWaits("test-after", None)
    waits.close()
    done: list[int] = []
    waits.run(lambda: done.append(1))
    assert done == [1]
    _wait_until_no_thread_of("test-after")


def test_an_interrupted_wait_does_not_give_its_outcome_to_the_next_one() -> None:
    waits = MovementWaits("test-interrupt", None)

    class Interrupted(BaseException):
        pass

    def interrupt() -> None:
        raise Interrupted

    with pytest.raises(Interrupted):  # as a signal's handler does in the middle of the wait
        waits.run(interrupt)
    seen: list[str] = []
    waits.run(lambda: seen.append("next"))
    assert seen == ["next"]
    waits.close()
    _wait_until_no_thread_of("test-interrupt")


def test_a_failure_tells_who_waits_for_a_future_and_keeps_the_group() -> None:
    class Group:
        pass

    group = Group()
    waits, group_left = MovementWaits("test-told", group), weakref.ref(group)
    del group
    release, told = threading.Event(), list[str]()
    tell, forgotten = (lambda error: told.append(str(error))), (lambda error: told.append("forgotten"))
    waits.on_end(tell, release.wait)
    waits.on_end(forgotten, release.wait)
    waits.forget(forgotten)
    waits.end(TransportError("rank 1 died"))
    assert told == ["rank 1 died"]
    assert group_left() is not None, "torch would wait for its threads as it is freed"
    waits.on_end(tell, release.wait)
    assert told == ["rank 1 died"] * 2
    release.set()
    _wait_until_no_thread_of("test-told")
    assert group_left() is None
