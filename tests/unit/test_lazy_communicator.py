# SPDX-License-Identifier: Apache-2.0
"""A connection that does not come to an end, or is interrupted."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from detcomm import lazy_communicator
from detcomm.errors import PeerTimeoutError, TransportError
from detcomm.lazy_communicator import LazyCommunicator

PATIENCE_S = 60.0


class _Made:
    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


def test_a_store_that_does_not_answer_ends_the_call_at_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_communicator, "_OVERTIME_S", 0.1)
    answers = threading.Event()
    late: Any = _Made()

    def connect(timeout_s: float, give_up: Callable[[], bool]) -> Any:
        assert answers.wait(PATIENCE_S)
        assert give_up()
        return late

    lazy = LazyCommunicator("data", connect)
    with pytest.raises(PeerTimeoutError, match=r"group data was not connected: the store did not answer within 0\.1 s"):
        lazy.connect(0.1)
    answers.set()
    assert late.closed.wait(PATIENCE_S), "what nobody wants any more is released"
    with pytest.raises(TransportError, match="the store did not answer"):
        lazy.connect(PATIENCE_S)


def test_an_interrupted_connection_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = _Made()
    goes_on = threading.Event()

    def connect(timeout_s: float, give_up: Callable[[], bool]) -> Any:
        assert goes_on.wait(PATIENCE_S)
        return made

    class _Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

    lazy = LazyCommunicator("data", connect)
    monkeypatch.setattr(lazy, "_changed", _Interrupted())
    with pytest.raises(KeyboardInterrupt):
        lazy.connect(PATIENCE_S)
    goes_on.set()
    assert made.closed.wait(PATIENCE_S)
    with pytest.raises(TransportError, match=r"group data was not connected: .*KeyboardInterrupt"):
        lazy.connect(PATIENCE_S)
