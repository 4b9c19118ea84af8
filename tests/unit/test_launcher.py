# SPDX-License-Identifier: Apache-2.0
"""torch's launch variables from those of MPI and SLURM launchers."""

import pytest

from detcomm.launcher import Placement, fill_environment, find_placement, first_of_nodelist, job_port

HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "PMI_FD": "9"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-login-4711@1",
}
SRUN = {
    "SLURM_PROCID": "6",
    "SLURM_STEP_NUM_TASKS": "10",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "10",
}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "10", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1234"}


def no_rendezvous(placement: Placement) -> None:
    return None


def test_open_mpi_on_one_host_needs_no_rendezvous() -> None:
    environ = dict(OPEN_MPI)
    added = fill_environment(environ, no_rendezvous)
    assert added == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job_port("prterun-login-4711@1")),
    }
    assert environ == OPEN_MPI | added


def test_hydra_on_several_hosts_asks_for_a_rendezvous() -> None:
    asked: list[Placement] = []

    def rendezvous(placement: Placement) -> tuple[str, int]:
        asked.append(placement)
        return "10.0.0.7", 29400

    added = fill_environment(dict(HYDRA), rendezvous)
    assert added == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "29400",
    }
    assert [(p.launcher, p.rank) for p in asked] == [("MPICH", 5)]


def test_srun_gives_the_first_host_and_a_port_of_the_step() -> None:
    placement = find_placement(SRUN)
    assert placement == Placement("SLURM", 6, 10, 2, 4, "slurm-1234.0", "gpu07")
    added = fill_environment(dict(SRUN), no_rendezvous)
    assert (added["MASTER_ADDR"], added["MASTER_PORT"]) == ("gpu07", str(job_port("slurm-1234.0")))
    assert find_placement(SRUN | {"SLURM_NODEID": "2", "SLURM_PROCID": "8", "SLURM_LOCALID": "0"}) == Placement(
        "SLURM", 8, 10, 0, 2, "slurm-1234.0", "gpu07"
    )


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH_SCRIPT,
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "x"},
    ],
)
def test_nothing_is_made_up(environ: dict[str, str]) -> None:
    assert find_placement(environ) is None
    before = dict(environ)
    assert fill_environment(environ, no_rendezvous) == {}
    assert environ == before


@pytest.mark.parametrize("given", [{"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0"}, {"WORLD_SIZE": "2"}])
def test_an_identity_from_elsewhere_is_left_whole(given: dict[str, str]) -> None:
    environ = OPEN_MPI | given
    assert fill_environment(environ, no_rendezvous) == {}
    assert environ == OPEN_MPI | given


def test_variables_that_are_set_are_kept() -> None:
    environ = OPEN_MPI | {"MASTER_ADDR": "myhost", "MASTER_PORT": "1", "LOCAL_RANK": "7"}
    added = fill_environment(environ, no_rendezvous)
    assert added == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    assert environ["LOCAL_RANK"] == "7"
    only_port = OPEN_MPI | {"MASTER_PORT": "1"}
    assert fill_environment(only_port, no_rendezvous)["MASTER_ADDR"] == "127.0.0.1"
    assert only_port["MASTER_PORT"] == "1"


def test_without_a_rendezvous_the_master_stays_unset() -> None:
    assert set(fill_environment(dict(HYDRA), no_rendezvous)) == {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node7", "node7"),
        ("node[01-04,7],login", "node01"),
        ("rack[2,5-6]-n", "rack2-n"),
        ("a,b", "a"),
        ("n[9]", "n9"),
    ],
)
def test_first_of_nodelist(nodelist: str, first: str) -> None:
    assert first_of_nodelist(nodelist) == first


def test_ports_of_jobs_differ_and_stay_below_the_ephemeral_range() -> None:
    ports = {job_port(f"slurm-{job}.0") for job in range(100)}
    assert len(ports) > 90
    assert all(1024 < port < 32768 for port in ports)
