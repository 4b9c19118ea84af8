# SPDX-License-Identifier: Apache-2.0
"""The launcher of ranks itself: results by rank, the first failure as the error, nothing left behind."""

import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
import torch.distributed as dist

from tests import launch


def _identify(rank: int, world_size: int, word: str) -> tuple[int, int, str, str]:
    return rank, world_size, word, os.environ["RANK"]


def _raise_on(rank: int, world_size: int, bad: int) -> int:
    print("a line printed by", rank)
    if rank == bad:
        raise ValueError(f"no luck on {rank}")
    return rank


def _sleep_on(rank: int, world_size: int, sleeper: int) -> int:
    if rank == sleeper:
        time.sleep(300)
    return rank


def _kill_self(rank: int, world_size: int, victim: int) -> int:
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def _pid(rank: int, world_size: int) -> int:
    return os.getpid()


def _environment_of(rank: int, world_size: int, name: str) -> str | None:
    return os.environ.get(name)


def _begin_group(rank: int, world_size: int) -> None:
    dist.init_process_group("gloo")


def _add_ranks(rank: int, world_size: int) -> float:
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    return tensor.item()


def _end_group(rank: int, world_size: int) -> None:
    dist.destroy_process_group()


def _sum_of_ranks(rank: int, world_size: int) -> float:
    _begin_group(rank, world_size)
    total = _add_ranks(rank, world_size)
    _end_group(rank, world_size)
    return total


@pytest.fixture(scope="module")
def ranks() -> Iterator[launch.Ranks]:
    with launch.Ranks(3) as standing:
        yield standing


def test_results_come_back_by_rank() -> None:
    assert launch.run(3, _identify, "word") == [(rank, 3, "word", str(rank)) for rank in range(3)]


def test_a_raising_rank_is_the_error_with_its_traceback_and_output(ranks: launch.Ranks) -> None:
    with pytest.raises(launch.RankFailure, match=r"rank 1 of 3: raised(.|\n)*no luck on 1(.|\n)*printed by 2"):
        ranks.run(_raise_on, 1)


def test_a_rank_that_does_not_finish_is_named_with_its_stacks_and_killed(ranks: launch.Ranks) -> None:
    pids = ranks.pids
    with pytest.raises(launch.RankFailure, match=r"rank 2 of 3: had not finished(.|\n)*_sleep_on"):
        ranks.run(_sleep_on, 2, timeout_s=3.0)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_rank_that_dies_is_an_error_unless_it_may(ranks: launch.Ranks) -> None:
    with pytest.raises(launch.RankFailure, match="rank 0 of 3: ended without a result, exit code -9"):
        ranks.run(_kill_self, 0)
    assert ranks.run(_kill_self, 1, may_die=True) == [0, launch.Died(-9), 2]


def test_standing_ranks_are_the_same_processes_from_run_to_run(ranks: launch.Ranks) -> None:
    assert ranks.run(_pid) == ranks.run(_pid) == ranks.pids


def test_variables_last_for_one_run(ranks: launch.Ranks) -> None:
    name = "DETCOMM_LAUNCH_TEST"
    assert ranks.run(_environment_of, name, env={name: "x"}) == ["x"] * 3
    assert ranks.run(_environment_of, name, env=[{}, {name: "y"}, {}]) == [None, "y", None]
    assert ranks.run(_environment_of, name) == [None] * 3


def test_each_run_meets_in_a_store_of_its_own(ranks: launch.Ranks) -> None:
    assert [ranks.run(_sum_of_ranks) for _ in range(3)] == [[3.0] * 3] * 3


def test_a_group_can_stand_from_run_to_run(ranks: launch.Ranks) -> None:
    ranks.run(_begin_group)
    assert [ranks.run(_add_ranks, same_store=True) for _ in range(3)] == [[3.0] * 3] * 3
    ranks.run(_end_group, same_store=True)


def test_rank_0_can_host_the_store() -> None:
    assert launch.run(3, _sum_of_ranks, store_host="rank0") == [3.0] * 3
