# SPDX-License-Identifier: Apache-2.0
"""A wait that its library does not end can be left behind, and a wait that ends gives what it ended with."""

import gc
import threading
import time
import weakref

import pytest

from detcomm.errors import PeerTimeoutError, TransportError
from detcomm.transports.waiting_thread import WaitingThread

NEVER_S = 100_000.0
PATIENCE_S = 60.0


def _threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def _wait_until_ended(name: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while _threads(name):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_waits_follow_each_other_on_one_thread() -> None:
    waiting = WaitingThread("test-waits")
    seen: list[tuple[int, str]] = []
    for number in range(3):
        waiting.run(lambda: seen.append((number, threading.current_thread().name)), NEVER_S)  # noqa: B023 - run now
    assert seen == [(number, "test-waits") for number in range(3)]
    waiting.close()
    waiting.close()
    _wait_until_ended("test-waits")


def test_what_a_wait_raises_comes_out_and_the_next_one_runs() -> None:
    waiting = WaitingThread("test-raises")

    def late() -> None:
        raise PeerTimeoutError("rank 1 is late")

    with pytest.raises(PeerTimeoutError, match="rank 1 is late"):
        waiting.run(late, NEVER_S)
    done: list[int] = []
    waiting.run(lambda: done.append(1), NEVER_S)
    assert done == [1]
    waiting.close()


def test_a_stuck_wait_is_left_behind_and_ends_with_its_thread() -> None:
    waiting = WaitingThread("test-stuck")
    is_in, is_let_go = threading.Event(), threading.Event()

    class Memory:
        pass

    memory = Memory()
    is_alive = weakref.ref(memory)

    def stuck(kept: object = memory) -> None:
        is_in.set()
        assert is_let_go.wait(PATIENCE_S)

    def abandon() -> None:
        assert is_in.wait(PATIENCE_S)
        waiting.abandon(TransportError("rank 2 died"))

    abandoning = threading.Thread(target=abandon)
    abandoning.start()
    with pytest.raises(TransportError, match=r"^rank 2 died$"):
        waiting.run(stuck, NEVER_S)
    abandoning.join()
    assert _threads("test-stuck"), "it is in its wait"
    del memory, stuck
    gc.collect()
    assert is_alive() is not None, "what is waited for stays as long as somebody waits for it"
    is_let_go.set()
    _wait_until_ended("test-stuck")
    gc.collect()
    assert is_alive() is None


def test_a_wait_that_breaks_its_word_is_told() -> None:
    waiting = WaitingThread("test-endless")
    is_let_go = threading.Event()
    with pytest.raises(TransportError, match=r"what should end within 0\.1 s has not ended"):
        waiting.run(lambda: is_let_go.wait(PATIENCE_S) and None, 0.1)
    is_let_go.set()
    waiting.close()
    _wait_until_ended("test-endless")
