# SPDX-License-Identifier: Apache-2.0
"""One program under mpirun, torchrun and srun's variables; and what the job does when a rank dies."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from detcomm.launcher import Placement, agree_over_mpi
from tests import launch_mpi

PROGRAM = str(Path(__file__).with_name("launched_program.py"))
BOUND_S = 60.0
"""From a death to the end of the job; two seconds are promised on a machine with enough cores."""


def expected_lines(world_size: int) -> list[str]:
    total = 2**world_size - 1
    return [f"rank {rank} of {world_size}, local {rank} of {world_size}: {total}" for rank in range(world_size)]


def rank_lines(output: str, world_size: int) -> list[str]:
    """The ranks' lines; mpirun may run two of them together."""
    total = 2**world_size - 1
    return sorted(re.findall(rf"rank \d+ of \d+, local \d+ of \d+: {total}", output))


def check_end_after_death(exit_code: int, output: str, world_size: int) -> None:
    ended = time.time()
    assert exit_code != 0, output
    assert rank_lines(output, world_size) == expected_lines(world_size)
    died = re.search(r"dies at ([0-9.]+)", output)
    assert died is not None, output
    took_s = ended - float(died[1])
    print(f"the job ended {took_s:.2f} s after the death")
    assert took_s < BOUND_S, output


def agree(rank: int, world_size: int) -> list[tuple[str, int] | None]:
    right = Placement("MPICH", rank, world_size, 0, 1)
    wrong = Placement("MPICH", rank, world_size + 1, 0, 1)
    return [agree_over_mpi(right), agree_over_mpi(wrong)]


def test_ranks_of_several_hosts_agree_on_the_master_over_mpi() -> None:
    results = launch_mpi.run(3, agree)
    assert results == [results[0]] * 3
    (address, port), otherwise = results[0]
    assert address
    assert 0 < port < 65536
    assert otherwise is None, "MPI's world is not the launcher's"


def test_mpirun() -> None:
    command = [launch_mpi.mpirun(), "-n", "3", sys.executable, PROGRAM]
    exit_code, output = launch_mpi.run_command(command)
    assert exit_code == 0, output
    assert rank_lines(output, 3) == expected_lines(3)


@pytest.mark.parametrize("transport", ["mpi", "auto"])
def test_a_death_ends_the_job_of_mpirun(transport: str) -> None:
    command = [launch_mpi.mpirun(), "-n", "3", sys.executable, PROGRAM, "1"]
    exit_code, output = launch_mpi.run_command(command, env={"DETCOMM_TRANSPORT": transport})
    check_end_after_death(exit_code, output, 3)


def test_a_death_ends_the_job_of_torchrun() -> None:
    """Its agent may end the others before they can tell who died; ``test_faults.py`` looks at that."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    exit_code, output = launch_mpi.run_command([*torchrun, PROGRAM, "1"])
    check_end_after_death(exit_code, output, 3)


def test_the_variables_of_srun() -> None:
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "node[7-8]",
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM],
            cwd=Path(__file__).parents[2],
            env=environment | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert rank_lines("".join(outputs), 2) == expected_lines(2), outputs
