# SPDX-License-Identifier: Apache-2.0
"""Who am I, when the launcher is not torchrun: torch's variables filled from those of MPI and SLURM launchers.

``mpirun`` and ``srun`` set no ``RANK``; ``init_process_group`` reads nothing else. A variable that is set already is
never overridden. This file knows nothing of torch.
"""

import os
import re
import socket
import zlib
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

_FIRST_PORT = 20000
_NUM_PORTS = 12000
"""Ports of jobs that have no other way to agree on one: below the range that the kernel hands out."""


@dataclass(frozen=True)
class Placement:
    """One rank's place in a job, as its launcher tells it.

    Args:
        launcher: the launcher's name, for messages.
        job: text that is the same on all ranks of the job and on no other job of these hosts; ``None`` if the
            launcher gives none.
        first_host: the host of rank 0; ``None`` if the launcher does not tell.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    job: str | None = None
    first_host: str | None = None


def find_placement(environ: Mapping[str, str]) -> Placement | None:
    """The place that Open MPI, MPICH (Hydra) or SLURM gave this process, or ``None`` under another launcher."""
    for find in (_open_mpi, _hydra, _slurm):
        if (placement := find(environ)) is not None:
            return placement
    return None


def fill_environment(
    environ: MutableMapping[str, str] | None = None,
    rendezvous: Callable[[Placement], tuple[str, int] | None] | None = None,
) -> dict[str, str]:
    """Set those of torch's launch variables that are absent, from the launcher's own.

    Nothing is done where ``RANK`` and ``WORLD_SIZE`` are set (torchrun), or where only one of them is: half an
    identity from the caller and half from the launcher would be nobody's.

    Args:
        environ: the variables; default: those of the process.
        rendezvous: gives the master's address and port where the variables do not tell; default: ``agree_over_mpi``.

    Returns:
        What was set.
    """
    environ = os.environ if environ is None else environ
    placement = find_placement(environ)
    if placement is None or "RANK" in environ or "WORLD_SIZE" in environ:
        return {}
    values = {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
    }
    if "MASTER_ADDR" not in environ or "MASTER_PORT" not in environ:
        master = _master(placement) or (rendezvous or agree_over_mpi)(placement)
        if master is not None:
            values |= {"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])}
    added = {name: value for name, value in values.items() if name not in environ}
    environ.update(added)
    return added


def agree_over_mpi(placement: Placement) -> tuple[str, int] | None:
    """Rank 0's address and a free port there, broadcast over MPI: for jobs of several hosts under ``mpirun``.

    Returns:
        ``None`` where mpi4py is not installed, or where MPI's world is another than the launcher's.
    """
    try:
        from mpi4py import MPI
    except ImportError:
        return None
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (placement.rank, placement.world_size):
        return None
    answer: tuple[str, int] | None = None
    if world.rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            answer = (socket.gethostbyname(socket.gethostname()), free.getsockname()[1])
    agreed: tuple[str, int] | None = world.bcast(answer)
    return agreed


def first_of_nodelist(nodelist: str) -> str:
    """The first host of SLURM's compressed list: ``node[01-04,7],login`` gives ``node01``."""
    first = re.match(r"([^,\[]*)(?:\[([^\]]*)\])?([^,\[]*)", nodelist)
    if first is None:
        return nodelist
    prefix, ranges, suffix = first.groups()
    number = re.split(r"[-,]", ranges)[0] if ranges else ""
    return f"{prefix}{number}{suffix}"


def job_port(job: str) -> int:
    """A port that all ranks of a job derive alike, and other jobs hardly ever share."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


def _master(placement: Placement) -> tuple[str, int] | None:
    """Address and port of the rendezvous, where the launcher's variables tell enough."""
    if placement.job is None:
        return None
    if placement.local_world_size == placement.world_size:
        return "127.0.0.1", job_port(placement.job)
    if placement.first_host is not None:
        return placement.first_host, job_port(placement.job)
    return None


def _open_mpi(environ: Mapping[str, str]) -> Placement | None:
    numbers = _numbers(
        environ,
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )
    if numbers is None:
        return None
    rank, world_size, local_rank, local_world_size = numbers
    return Placement("Open MPI", rank, world_size, local_rank, local_world_size, environ.get("PMIX_NAMESPACE"))


def _hydra(environ: Mapping[str, str]) -> Placement | None:
    numbers = _numbers(environ, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if numbers is None:
        return None
    rank, world_size, local_rank, local_world_size = numbers
    # Hydra names no job, but all ranks of one host descend from one proxy.
    proxy = _ancestor("hydra_pmi_proxy")
    job = None if proxy is None else f"hydra-{proxy}"
    return Placement("MPICH", rank, world_size, local_rank, local_world_size, job)


def _slurm(environ: Mapping[str, str]) -> Placement | None:
    # The variables of the step, not of the job: a batch script outside srun is no rank of anything.
    numbers = _numbers(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    if numbers is None:
        return None
    rank, world_size, local_rank = numbers
    local_world_size = _tasks_on_node(
        environ.get("SLURM_STEP_TASKS_PER_NODE", str(world_size)), int(environ.get("SLURM_NODEID", "0"))
    )
    nodelist = environ.get("SLURM_STEP_NODELIST", "")
    job = f"slurm-{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    return Placement("SLURM", rank, world_size, local_rank, local_world_size, job, first_of_nodelist(nodelist) or None)


def _tasks_on_node(text: str, node: int) -> int:
    """SLURM's compressed list of counts: ``8(x3),4`` means three nodes of 8 and one of 4."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is not None:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else 1


def _numbers(environ: Mapping[str, str], *names: str) -> tuple[int, ...] | None:
    """The values of all variables as numbers, or ``None`` if one is absent or is no number."""
    values = [environ.get(name, "") for name in names]
    return tuple(int(value) for value in values) if all(value.isdigit() for value in values) else None


def _ancestor(name: str) -> int | None:
    """The nearest ancestor process with this name."""
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                text = stat.read()
        except OSError:
            return None
        command, _, rest = text.partition("(")[2].rpartition(")")
        if command.startswith(name[:15]):
            return pid
        pid = int(rest.split()[1])
    return None
