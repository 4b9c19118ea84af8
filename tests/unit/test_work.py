# SPDX-License-Identifier: Apache-2.0
"""What an asynchronous call returns: waiting, errors, futures that are asked for before and after the end."""

import threading
from datetime import timedelta

import pytest
import torch

from detcomm.errors import DetcommError, MismatchError, PeerTimeoutError, UsageError
from detcomm.work import FinishedWork, PendingWork


def _pending(may_wait: object = None) -> tuple[PendingWork, torch.Tensor, list[DetcommError]]:
    late: list[DetcommError] = []
    result = torch.ones(3)

    def check() -> None:
        if may_wait is not None:
            raise UsageError("not here")

    return PendingWork("all_reduce", [result], check, late.append), result, late


def test_a_work_is_pending_until_it_is_finished() -> None:
    work, result, _ = _pending()
    assert not work.is_completed()
    threading.Timer(0.02, work.finish).start()
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is result


def test_every_wait_raises_the_error_anew() -> None:
    work, _, _ = _pending()
    work.finish(MismatchError("the ranks disagree"))
    errors = []
    for _ in range(2):
        with pytest.raises(MismatchError, match="the ranks disagree") as caught:
            work.wait()
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert not work.is_success()
    assert isinstance(work.exception(), MismatchError)


def test_a_wait_with_a_limit_reports_that_it_is_late() -> None:
    work, _, late = _pending()
    with pytest.raises(PeerTimeoutError, match=r"all_reduce: not done within the 0\.01 s"):
        work.wait(timedelta(seconds=0.01))
    assert len(late) == 1
    work.finish()
    assert work.wait(timedelta(seconds=0.01))


def test_a_limit_of_zero_is_none() -> None:
    """torch's C++ callers pass zero for no timeout."""
    work, _, late = _pending()
    threading.Timer(0.05, work.finish).start()
    assert work.wait(timedelta(0))
    assert not late


def test_waiting_is_refused_where_it_would_never_end() -> None:
    work, _, _ = _pending(may_wait=False)
    with pytest.raises(UsageError, match="not here"):
        work.wait()
    work.finish()
    assert work.wait()


@pytest.mark.parametrize("asked_first", [True, False])
def test_a_future_has_the_results(asked_first: bool) -> None:
    work, result, _ = _pending()
    if asked_first:
        future = work.get_future()
        assert not future.done()
    work.finish()
    future = work.get_future()
    assert work.get_future() is future
    assert future.wait()[0] is result


@pytest.mark.parametrize("asked_first", [True, False])
def test_a_future_of_a_failed_work_raises(asked_first: bool) -> None:
    work, _, _ = _pending()
    if asked_first:
        work.get_future()
    work.finish(MismatchError("the ranks disagree"))
    with pytest.raises(RuntimeError, match="the ranks disagree"):
        work.get_future().wait()


def test_callbacks_run_on_the_thread_that_finishes_the_work() -> None:
    work, _, _ = _pending()
    threads: list[int] = []
    future = work.get_future().then(lambda _: threads.append(threading.get_ident()))
    finisher = threading.Thread(target=work.finish)
    finisher.start()
    identity = finisher.ident
    finisher.join()
    future.wait()
    assert threads == [identity]


def test_finished_work() -> None:
    result = torch.ones(2)
    work = FinishedWork([result])
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.get_future().wait()[0] is result
