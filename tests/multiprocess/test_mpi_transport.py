# SPDX-License-Identifier: Apache-2.0
"""The MPI transport under mpirun: every case of ``mpi_cases.py``, in one launch."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.mpi

WORLD_SIZE = 4
TIMEOUT_S = 400
CASES = [
    line.split("(")[0].removeprefix("def ")
    for line in Path(__file__).with_name("mpi_cases.py").read_text().splitlines()
    if line.startswith("def case_")
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if mpirun is None:
        pytest.skip("there is no mpirun here")
    folder = tmp_path_factory.mktemp("mpi")
    command = [mpirun, "-n", str(WORLD_SIZE), sys.executable, "-m", "tests.multiprocess.mpi_cases", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    files = [folder / f"rank{rank}.json" for rank in range(WORLD_SIZE)]
    assert all(file.exists() for file in files), f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("case", CASES)
def test_case(results: list[dict[str, str | None]], case: str) -> None:
    outcomes = [result.get(case, "was not reached") for result in results]
    failures = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome is not None}
    assert not failures, "\n".join(f"rank {rank}: {failure}" for rank, failure in failures.items())
