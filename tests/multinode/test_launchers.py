# SPDX-License-Identifier: Apache-2.0
"""The digests once more, under the launchers that users have: torchrun on each node, mpirun on the first.

Over gloo, MPI, and shared memory inside nodes with either between them.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict

import pytest

from tests.multinode import digests
from tests.multinode.digests import Way
from tests.netlab import jobs
from tests.netlab.lab import ROOT, Lab

TIMEOUT_S = 300.0

GLOO_WAYS = (Way("tree"), Way("tree", schedule="hierarchical", transport="gloo"), Way("ring"))
MPI_WAYS = (Way("tree", transport="mpi"), Way("tree", schedule="hierarchical", transport="hybrid_mpi"))
ALL_MPI_WAYS = (*MPI_WAYS, Way("linear", transport="mpi"), Way("tree", accumulate="wire", transport="hybrid_mpi"))

FULL_LAYOUTS = [[8], [4, 4], [2, 2, 2, 2], [1] * 8, [3, 5], [6, 2]]

Launcher = Callable[..., int]


def check(
    lab: Lab, launcher: Launcher, layout: Sequence[int], ways: Sequence[Way], nodes: Sequence[int] | None = None
) -> None:
    program = ["-m", "tests.multinode.digests", json.dumps([asdict(way) for way in ways])]
    if launcher is jobs.mpirun:
        pytest.importorskip("mpi4py", reason="mpi4py is not installed")
        program = [sys.executable, *program]
    with tempfile.TemporaryFile() as output:
        code = launcher(
            lab,
            layout,
            program,
            nodes=nodes,
            environment={"PYTHONPATH": str(ROOT)},
            output=output.fileno(),
            timeout_s=TIMEOUT_S,
        )
        output.seek(0)
        text = output.read().decode(errors="replace")
    assert code == 0, text
    (line,) = [line for line in text.splitlines() if line.startswith("digests ")]
    expected = {str(way): digests.expected(way.contract, sum(layout)) for way in ways}
    assert json.loads(line.removeprefix("digests ")) == expected


def test_torchrun(lab: Lab) -> None:
    check(lab, jobs.torchrun, [2, 1], GLOO_WAYS, nodes=[1, 0])


@pytest.mark.mpi
def test_mpirun(lab: Lab) -> None:
    check(lab, jobs.mpirun, [1, 2], MPI_WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", FULL_LAYOUTS)
def test_torchrun_everywhere(lab: Lab, layout: list[int]) -> None:
    check(lab, jobs.torchrun, layout, GLOO_WAYS)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("layout", FULL_LAYOUTS)
def test_mpirun_everywhere(lab: Lab, layout: list[int]) -> None:
    check(lab, jobs.mpirun, layout, ALL_MPI_WAYS)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("layout", [[4, 4], [3, 5]])
def test_mpirun_over_bad_links(lab: Lab, layout: list[int]) -> None:
    lab.shake(delay_ms=3, jitter_ms=2, loss_percent=1)
    check(lab, jobs.mpirun, layout, MPI_WAYS, nodes=[2, 1])


@pytest.mark.slow
def test_torchrun_over_bad_links(lab: Lab) -> None:
    lab.shake(delay_ms=3, jitter_ms=2, loss_percent=1)
    check(lab, jobs.torchrun, [2, 2, 2, 2], GLOO_WAYS, nodes=[3, 1, 0, 2])
