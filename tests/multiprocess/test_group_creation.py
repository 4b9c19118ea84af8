# SPDX-License-Identifier: Apache-2.0
"""A group that cannot be made fails on every rank, soon and with the reason, however it fails."""

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import detcomm
from detcomm import stock_gloo
from tests import launch
from tests.multiprocess.watched_rank import connect_store, pass_barrier

BOUND_S = 30.0
TIMEOUT = timedelta(seconds=120)

Seen = tuple[str, str]


def attempt(timeout: timedelta = TIMEOUT, **options: Any) -> Seen:
    """Kind and text of the error of ``init_process_group``; both empty if it succeeds."""
    started = time.monotonic()
    try:
        pg_options = detcomm.Options(**options) if options else None
        dist.init_process_group("detcomm", pg_options=pg_options, timeout=timeout)
    except RuntimeError as error:
        took_s = time.monotonic() - started
        print(f"after {took_s:.3f} s: {type(error).__name__}: {error}", flush=True)
        assert took_s < BOUND_S
        return type(error).__name__, str(error)
    return "", ""


def differ(rank: int, world_size: int, fields: dict[str, Any]) -> Seen:
    return attempt(**fields if rank == 1 else {"association": "tree"})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"association": "ring"}, "option association: tree on ranks 0, 2; ring on rank 1"),
        ({"chunk_bytes": 4096}, "option chunk_bytes: None on ranks 0, 2; 4096 on rank 1"),
    ],
)
def test_options_that_differ(fields: dict[str, Any], text: str) -> None:
    results = launch.run(3, differ, fields)
    assert len(set(results)) == 1
    kind, found = results[0]
    assert kind == "MismatchError"
    assert text in found


def read_environment(rank: int, world_size: int) -> Seen:
    return attempt()


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ({"DETCOMM_ASSOCIATION": "bush"}, "option association"),
        ({"DETCOMM_CHUNK_BYTES": "many"}, "DETCOMM_CHUNK_BYTES: expected a number"),
        ({"GLOO_SOCKET_IFNAME": "none0"}, "GLOO_SOCKET_IFNAME=none0"),
    ],
)
def test_a_refusal_of_one_rank_is_told_to_all(variable: dict[str, str], text: str) -> None:
    results = launch.run(3, read_environment, env=[{}, {}, variable])
    assert results[2][0] == "UsageError"
    assert text in results[2][1]
    for kind, found in results[:2]:
        assert kind == "MismatchError"
        assert "rank 2 refused" in found
        assert text in found


def refuse_together(rank: int, world_size: int) -> Seen:
    return attempt(transport="shared_memory")


def test_all_ranks_refuse_alike() -> None:
    results = launch.run(3, refuse_together, env=[{"DETCOMM_HOST_ID": f"host{rank}"} for rank in range(3)])
    for kind, text in results:
        assert kind == "UsageError"
        assert "shared_memory connects ranks of one host" in text


def come_late(rank: int, world_size: int) -> Seen:
    pass_barrier(connect_store(world_size), "started", world_size)
    if rank == 1:
        time.sleep(10.0)
    return attempt(timeout=timedelta(seconds=5))


def test_a_rank_that_does_not_come_in_time() -> None:
    results = launch.run(3, come_late)
    for kind, text in (results[0], results[2]):
        assert kind in ("PeerTimeoutError", "MismatchError")  # the second to give up may read of the first
        assert "rank 1 of 3 did not come" in text
    assert results[1][0] == "MismatchError", "it came, and waited for those who had given up"
    assert "did not come" in results[1][1]


def break_off(rank: int, world_size: int) -> Seen:
    """Rank 1 gets lost between the introduction and the connection."""
    if rank == 1:
        stock_gloo.connect_mesh = _die
    return attempt()


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(*_: Any) -> None:
    raise OSError("no room for a socket")


def test_a_rank_that_dies_while_connecting() -> None:
    results = launch.run(3, break_off, may_die=True)
    assert results[1] == launch.Died(-signal.SIGKILL)
    for kind, text in (results[0], results[2]):
        assert kind == "TransportError"
        assert "rank 1 died" in text


def break_off_raising(rank: int, world_size: int) -> Seen:
    if rank != 1:
        return attempt()
    stock_gloo.connect_mesh = _raise
    with pytest.raises(OSError, match="no room"):
        dist.init_process_group("detcomm", timeout=TIMEOUT)
    return "OSError", ""


def test_a_rank_that_fails_while_connecting() -> None:
    results = launch.run(3, break_off_raising)
    for kind, text in (results[0], results[2]):
        assert kind == "TransportError"
        assert "rank 1 reports: no room for a socket" in text


def fail_and_try_again(rank: int, world_size: int) -> list[Seen]:
    """Under torchrun the store outlives a failure; the second attempt must not read the first one's keys."""
    seen = [attempt(association="ring" if rank == 1 else "tree"), attempt(association="tree")]
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    assert tensor.eq(world_size).all()
    dist.destroy_process_group()
    for _ in range(3):
        seen.append(attempt(association="linear"))
        dist.all_reduce(torch.ones(5))
        dist.destroy_process_group()
    return seen


def test_a_group_can_be_made_after_one_that_failed() -> None:
    for seen in launch.run(3, fail_and_try_again):
        assert [kind for kind, _ in seen] == ["MismatchError", "", "", "", ""]


def fail_in_a_subgroup(rank: int, world_size: int) -> Seen:
    assert attempt() == ("", "")
    options = detcomm.Options(association="ring" if rank == 2 else "tree")
    seen = ("", "")
    try:
        dist.new_group([1, 2], pg_options=options, backend="detcomm")
    except detcomm.MismatchError as error:
        seen = "MismatchError", str(error)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.eq(world_size).all()
    dist.destroy_process_group()
    return seen


def test_a_subgroup_that_fails_leaves_the_others_whole() -> None:
    results = launch.run(3, fail_in_a_subgroup)
    assert results[0] == ("", "")
    assert results[1] == results[2]
    assert "option association: tree on rank 0; ring on rank 1" in results[1][1]


def use_all_of_a_group(rank: int, world_size: int) -> Seen:
    assert attempt() == ("", "")
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, rank)
    assert objects == list(range(world_size))
    subgroup = dist.new_group([0, 2])
    tensor = torch.full((4,), float(rank))
    if rank != 1:
        dist.all_reduce(tensor, group=subgroup)
        assert tensor.eq(2.0).all()
    with pytest.raises(detcomm.MismatchError, match="the ranks disagree"):
        dist.all_reduce(torch.ones(3 + rank))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return type(dist.get_debug_level()).__name__, str(dist.get_debug_level())


@pytest.mark.parametrize("level", ["INFO", "DETAIL"])
def test_the_debug_levels_of_torch(level: str) -> None:
    assert launch.run(3, set_level_and_use, level) == [("DebugLevel", f"DebugLevel.{level}")] * 3


def set_level_and_use(rank: int, world_size: int, level: str) -> Seen:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = level
    dist.set_debug_level_from_env()
    return use_all_of_a_group(rank, world_size)
