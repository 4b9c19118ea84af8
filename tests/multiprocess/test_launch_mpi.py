# SPDX-License-Identifier: Apache-2.0
"""The launcher of MPI ranks itself: results by rank, a failure as the error."""

import pytest

from tests import launch, launch_mpi

pytestmark = pytest.mark.mpi


def _gather_ranks(rank: int, world_size: int, offset: int) -> list[int]:
    from mpi4py import MPI

    return MPI.COMM_WORLD.allgather(rank + offset)


def _raise_on(rank: int, world_size: int, bad: int) -> None:
    from mpi4py import MPI

    if rank == bad:
        raise ValueError(f"no luck on {rank}")
    MPI.COMM_WORLD.Barrier()


def test_results_come_back_by_rank() -> None:
    assert launch_mpi.run(3, _gather_ranks, 10) == [[10, 11, 12]] * 3


def test_a_raising_rank_ends_the_job_and_is_the_error() -> None:
    with pytest.raises(launch.RankFailure, match="no luck on 1"):
        launch_mpi.run(3, _raise_on, 1)


def test_a_command_that_does_not_end_is_killed() -> None:
    with pytest.raises(launch.RankFailure, match="not done within 1 s"):
        launch_mpi.run_command(["sleep", "300"], timeout_s=1.0)
