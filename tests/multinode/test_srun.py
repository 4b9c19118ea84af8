# SPDX-License-Identifier: Apache-2.0
"""The digests once more, under SLURM's ``srun``: a controller and two daemons on two nodes of the lab."""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.multinode import digests
from tests.multinode.digests import Way
from tests.netlab.lab import ROOT, Command, Lab

PATIENCE_S = 120.0
WAYS = (Way("tree"), Way("tree", schedule="hierarchical", transport="gloo"), Way("ring"))
PROGRAMS = ("slurmctld", "slurmd", "sinfo", "srun")

CONFIGURATION = """
ClusterName=lab
SlurmctldHost=node0
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=node[0-1] CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(lab: Lab, tmp_path: Path) -> Iterator[dict[str, str]]:
    """A cluster of nodes 0 and 1 that takes jobs: the variables with which ``srun`` finds it."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if missing := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    (tmp_path / "state").mkdir()
    (tmp_path / "slurm.conf").write_text(CONFIGURATION.format(folder=tmp_path))
    environment = dict(os.environ) | {"SLURM_CONF": str(tmp_path / "slurm.conf"), "PATH": path}
    daemons: list[Command] = []
    with (tmp_path / "output").open("w") as output:
        files = {"stdout": output.fileno(), "stderr": output.fileno()}
        try:
            daemons.append(lab.start(0, ["slurmctld", "-D", "-c"], environment=environment, **files))
            for node in range(2):
                command = ["slurmd", "-D", "-c", "-N", f"node{node}"]
                daemons.append(lab.start(node, command, environment=environment, **files))
            _wait_until_idle(lab, environment, tmp_path)
            yield environment
        finally:
            for daemon in reversed(daemons):
                daemon.end()


def _wait_until_idle(lab: Lab, environment: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    states = ""
    while states != "idle 2":
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text()[-2000:] for path in (*folder.glob("*.log"), folder / "output"))
            pytest.fail(f"the cluster is not up, but {states!r}\n{logs}")
        states = lab.call(0, ["sinfo", "--noheader", "--format=%T %D"], environment=environment)[1].strip()


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["block", "cyclic"])
def test_srun(lab: Lab, slurm: dict[str, str], distribution: str) -> None:
    """Ranks in blocks, and dealt to the nodes in turn."""
    layout = ["--nodes=2", "--ntasks=5" if distribution == "cyclic" else "--ntasks=8", f"--distribution={distribution}"]
    program = [sys.executable, "-m", "tests.multinode.digests", json.dumps([asdict(way) for way in WAYS])]
    own = slurm | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    code, text = lab.call(0, ["srun", *layout, *program], environment=own, timeout_s=2 * PATIENCE_S)
    assert code == 0, text
    (line,) = [line for line in text.splitlines() if line.startswith("digests ")]
    world_size = 5 if distribution == "cyclic" else 8
    expected = {str(way): digests.expected(way.contract, world_size) for way in WAYS}
    assert json.loads(line.removeprefix("digests ")) == expected
