# SPDX-License-Identifier: Apache-2.0
"""A rank that dies, stops or fails is named by every other rank, wherever that one waits.

Through torch.distributed, over each transport. Bounds on times are generous for loaded machines; the time that was
needed is printed.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import detcomm
from tests import launch
from tests.multiprocess.watched_rank import connect_store, pass_barrier

BOUND_S = 30.0
"""For seeing a death; two seconds are promised on a machine with enough cores."""
TIMEOUT = timedelta(seconds=120)
"""The groups': far above the bound, so that no timeout can pass for a death that was seen."""


def start(rank: int, transport: str, timeout: timedelta = TIMEOUT) -> None:
    options = detcomm.Options(transport=transport)
    dist.init_process_group("detcomm", pg_options=options, timeout=timeout)
    tensor = torch.full((1000,), float(rank))
    dist.all_reduce(tensor)
    dist.barrier()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def expect_error(call: Callable[[], Any]) -> tuple[str, str, float]:
    """The kind and text of the error that a call raises, and the seconds it took."""
    started = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    raise AssertionError("the call raised nothing")


def reduce_until_it_fails() -> None:
    tensor = torch.ones(1 << 20)
    for _ in range(100_000):
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)


def finish() -> None:
    """Destruction ends, with a lost peer too."""
    started = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - started < BOUND_S


def die_in_a_collective(rank: int, world_size: int, victim: int, transport: str) -> tuple[str, str, float]:
    start(rank, transport)
    if rank == victim:
        tensor = torch.ones(1 << 20)
        for _ in range(3):
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        die()
    seen = expect_error(reduce_until_it_fails)
    again = expect_error(lambda: dist.all_reduce(torch.ones(4)))
    assert f"rank {victim}" in again[1], again
    assert again[2] < BOUND_S
    finish()
    return seen


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
def test_killed_in_a_collective(transport: str, victim: int) -> None:
    check_named(launch.run(4, die_in_a_collective, victim, transport, may_die=True), victim)


def test_killed_with_the_store() -> None:
    check_named(launch.run(4, die_in_a_collective, 0, "gloo", may_die=True, store_host="rank0"), 0)


def test_killed_on_another_host() -> None:
    hosts = [{"DETCOMM_HOST_ID": name} for name in "aabb"]
    check_named(launch.run(4, die_in_a_collective, 2, "auto", env=hosts, may_die=True), 2)


def die_while_idle(rank: int, world_size: int, victim: int) -> tuple[str, str, float]:
    """Nobody is in a call when it happens: the next one is refused, at once."""
    start(rank, "auto")
    if rank == victim:
        die()
    membership = dist.group.WORLD._group._membership
    deadline = time.monotonic() + BOUND_S
    while membership.fault is None and time.monotonic() < deadline:
        time.sleep(0.01)
    seen = expect_error(lambda: dist.all_reduce(torch.ones(4)))
    finish()
    return seen


@pytest.mark.parametrize("victim", [0, 3])
def test_killed_while_all_are_idle(victim: int) -> None:
    check_named(launch.run(4, die_while_idle, victim, may_die=True), victim)


def die_far_from_those_who_wait(rank: int, world_size: int) -> tuple[str, str, float]:
    """Rank 1 dies. Rank 2 waits for rank 0, which waits for nobody."""
    start(rank, "gloo")
    if rank == 1:
        time.sleep(0.5)
        die()
    if rank == 2:
        seen = expect_error(lambda: dist.recv(torch.empty(4), src=0))
    else:
        time.sleep(2.0)
        deadline = time.monotonic() + BOUND_S
        while dist.group.WORLD._group._membership.fault is None and time.monotonic() < deadline:
            time.sleep(0.01)
        seen = expect_error(lambda: dist.broadcast(torch.empty(4), src=0))
    finish()
    return seen


def test_killed_while_only_a_non_neighbour_waits() -> None:
    check_named(launch.run(4, die_far_from_those_who_wait, may_die=True), 1)


def die_out_of_a_subgroup(rank: int, world_size: int) -> tuple[str, str, float] | None:
    """A death ends the groups of the dead alone."""
    store = connect_store(world_size)
    start(rank, "auto")
    others = dist.new_group([0, 2, 3])
    dist.new_group([0, 1])
    # A death while others still connect would be another test; and one that is on its way out of a barrier of the
    # group's own may see it there.
    pass_barrier(store, "all connected", world_size)
    if rank == 1:
        die()
    seen = expect_error(reduce_until_it_fails)
    tensor = torch.full((1000,), float(rank))
    dist.all_reduce(tensor, group=others)
    assert tensor.eq(5.0).all()
    finish()
    return seen


def test_groups_without_the_dead_rank_go_on() -> None:
    check_named(launch.run(4, die_out_of_a_subgroup, may_die=True), 1)


def raise_in_user_code(rank: int, world_size: int) -> tuple[str, str, float]:
    """An exception of the user's ends one rank's process in good order, as far as the group can see."""
    start(rank, "auto")
    if rank == 1:
        from multiprocessing import util

        util._exit_function()  # what a child of multiprocessing does before it ends
        os._exit(1)
    seen = expect_error(reduce_until_it_fails)
    finish()
    return seen


def test_a_rank_whose_program_ends_is_named() -> None:
    results = launch.run(4, raise_in_user_code, may_die=True)
    check_named(results, 1, exit_code=1)
    for rank in (0, 2, 3):
        assert "rank 1 has left after" in results[rank][1], results


def check_named(results: list[Any], victim: int, exit_code: int = -signal.SIGKILL) -> None:
    assert results[victim] == launch.Died(exit_code), results[victim]
    for rank, result in enumerate(results):
        if rank != victim:
            assert not isinstance(result, launch.Died), (rank, result)
            kind, text, took_s = result
            print(f"rank {rank} after {took_s:.3f} s: {kind}: {text}")
            assert kind == "TransportError"
            assert re.search(rf"rank {victim}\b", text), text
            assert took_s < BOUND_S


def stop_in_a_collective(rank: int, world_size: int, transport: str) -> tuple[str, str, float] | None:
    """A stopped rank is no dead one: only the timeout ends the wait for it."""
    start(rank, transport, timeout=timedelta(seconds=4))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    pid = int(store.get("pid"))
    while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "T":  # noqa: SIM115
        time.sleep(0.01)
    seen = expect_error(lambda: dist.all_reduce(torch.ones(1000)))
    store.add("seen", 1)
    if rank == 0:
        while store.add("seen", 0) < world_size - 1:
            time.sleep(0.01)
        os.kill(pid, signal.SIGCONT)
    return seen


@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
def test_a_stopped_rank_is_named_at_the_timeout(transport: str) -> None:
    results = launch.run(3, stop_in_a_collective, transport, may_die=True)
    for rank in (0, 2):
        kind, text, took_s = results[rank]
        print(f"rank {rank} after {took_s:.3f} s: {kind}: {text}")
        assert kind == "PeerTimeoutError"
        assert "rank 1" in text, text
        assert took_s > 2.0, "a stopped rank was taken for a dead one"


def make_and_destroy(rank: int, world_size: int, num_cycles: int) -> tuple[list[str], list[str]]:
    dist.init_process_group("detcomm", timeout=TIMEOUT)

    def cycle() -> None:
        group = dist.new_group(list(range(world_size)), backend="detcomm")
        dist.all_reduce(torch.ones(1000), group=group)
        dist.destroy_process_group(group)

    def descriptors() -> list[str]:
        names = []
        for name in os.listdir("/proc/self/fd"):
            try:
                names.append(os.readlink(f"/proc/self/fd/{name}").split(":")[0])
            except OSError:
                continue
        return sorted(names)

    for _ in range(3):
        cycle()
    dist.barrier()
    before = descriptors()
    for _ in range(num_cycles):
        cycle()
    dist.barrier()
    deadline = time.monotonic() + BOUND_S
    while len(after := descriptors()) > len(before) and time.monotonic() < deadline:
        time.sleep(0.05)  # gloo's own threads close what they held
    dist.destroy_process_group()
    return before, after


def test_no_descriptor_is_left_behind() -> None:
    for before, after in launch.run(2, make_and_destroy, 30):
        assert len(after) <= len(before), (before, after)
