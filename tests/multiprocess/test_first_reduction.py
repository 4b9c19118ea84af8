# SPDX-License-Identifier: Apache-2.0
"""A group is connected for reductions when the first one comes: what may go wrong then, what may go on meanwhile."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import detcomm
from detcomm import group, group_assembly
from tests import launch
from tests.multiprocess.watched_rank import connect_store, pass_barrier

BOUND_S = 90.0
"""For a loaded machine; the times that were needed are printed. The timeouts of the groups are longer."""
TIMEOUT = timedelta(seconds=300)

Seen = tuple[str, str]


def _error_of(attempt: Callable[[], Any]) -> Seen:
    started = time.monotonic()
    try:
        attempt()
    except RuntimeError as error:
        took_s = time.monotonic() - started
        print(f"after {took_s:.3f} s: {type(error).__name__}: {error}", flush=True)
        assert took_s < BOUND_S
        return type(error).__name__, str(error)
    return "no error", ""


def _connecting_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("detcomm-connect")]


def _all_gone(names: Callable[[], list[str]]) -> bool:
    deadline = time.monotonic() + BOUND_S
    while names() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not names()


def _break_off(rank: int, world_size: int, action: str) -> list[Seen]:
    """Rank 1 gets lost where the others wait for it."""
    dist.init_process_group("detcomm", timeout=TIMEOUT)
    if rank == 1:
        group_assembly.connect = {"die": _die, "raise": _raise}[action]
    seen = [_error_of(lambda: dist.all_reduce(torch.ones(4))), _error_of(lambda: dist.broadcast(torch.ones(4), 0))]
    assert _all_gone(_connecting_threads)
    dist.destroy_process_group()
    return seen


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(*_: Any) -> None:
    raise OSError("no room for a socket")


@pytest.mark.parametrize("variables", [{}, {"DETCOMM_TRANSPORT": "gloo"}])
def test_a_rank_that_dies_in_its_first_reduction(variables: dict[str, str]) -> None:
    results = launch.run(3, _break_off, "die", env=variables, may_die=True)
    assert results[1] == launch.Died(-signal.SIGKILL)
    for (kind, text), (later_kind, later_text) in (results[0], results[2]):
        assert kind == later_kind == "TransportError"
        assert "rank 1 died" in text
        assert "unusable since an earlier error" in later_text


def test_a_rank_that_fails_in_its_first_reduction() -> None:
    for seen in launch.run(3, _break_off, "raise"):
        for kind, text in seen:
            assert kind == "TransportError"
            assert "rank 1 could not connect: no room for a socket" in text


def _stay_away(rank: int, world_size: int, transport: str) -> list[Seen]:
    """Rank 1 reduces nothing, though the others wait for it."""
    store = connect_store(world_size)
    dist.init_process_group("detcomm", pg_options=detcomm.Options(transport=transport), timeout=TIMEOUT)
    dist.group.WORLD.set_timeout(timedelta(seconds=3))
    pass_barrier(store, "made", world_size)
    seen = [] if rank == 1 else [_error_of(lambda: dist.all_reduce(torch.ones(4)))]
    pass_barrier(store, "given up", world_size)
    seen.append(_error_of(lambda: dist.all_reduce(torch.ones(4))))
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_rank_that_does_not_come_is_named_at_the_timeout(transport: str) -> None:
    first, second, third = launch.run(3, _stay_away, transport)
    assert {kind for kind, _ in (first[0], third[0])} <= {"PeerTimeoutError", "TransportError"}
    # On a loaded machine the other one may be late as well.
    assert all(
        re.search(r"rank 1 did|ranks 0-2 did|ranks 0, 1 did|ranks 1, 2 did", seen[0][1]) for seen in (first, third)
    )
    assert second[0][0] in ("TransportError", "PeerTimeoutError")
    assert all("unusable" in seen[-1][1] for seen in (first, third))


def _destroy_meanwhile(rank: int, world_size: int) -> Seen:
    group.DRAIN_S = 0.5
    dist.init_process_group("detcomm", timeout=TIMEOUT)
    seen = ("no error", "")
    if rank == 0:
        work = dist.all_reduce(torch.ones(4), async_op=True)
    dist.destroy_process_group()
    if rank == 0:
        seen = _error_of(work.wait)
        assert _all_gone(_connecting_threads)
    return seen


def test_destruction_does_not_wait_for_those_who_do_not_come() -> None:
    kind, text = launch.run(2, _destroy_meanwhile)[0]
    assert kind == "TransportError"
    assert "destroyed with work in flight" in text or "has left" in text


def _go_on_meanwhile(rank: int, world_size: int) -> list[float]:
    """Ranks come to the first reductions of two groups in different orders, and wait in the store meanwhile."""
    dist.init_process_group("detcomm", timeout=TIMEOUT)
    groups = [dist.new_group(list(range(world_size))) for _ in range(2)]
    values = [torch.ones(100), torch.ones(100)]
    order = (0, 1) if rank == 0 else (1, 0)
    works = [dist.all_reduce(values[index], group=groups[index], async_op=True) for index in order[:1]]
    if rank == 0:
        dist.send(torch.full((2,), 7.0), 1)
        dist.new_group(list(range(world_size)))  # holds torch's connection to the store until rank 1 comes
        works.append(dist.all_reduce(values[1], group=groups[1], async_op=True))
    else:
        received = torch.zeros(2)
        dist.recv(received, 0)
        assert received.tolist() == [7.0, 7.0]
        works.append(dist.all_reduce(values[0], group=groups[0], async_op=True))
        works[1].wait()  # group 0's, which rank 0 connects while it waits for this rank in the store
        dist.new_group(list(range(world_size)))
    for work in works:
        work.wait()
    dist.destroy_process_group()
    return [float(value[0]) for value in values]


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_everything_else_goes_on_while_a_group_is_connected(transport: str) -> None:
    assert launch.run(2, _go_on_meanwhile, env={"DETCOMM_TRANSPORT": transport}) == [[2.0, 2.0]] * 2
