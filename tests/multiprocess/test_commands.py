# SPDX-License-Identifier: Apache-2.0
"""``detcomm probe`` and ``detcomm verify`` on real backends, between processes, as people call them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from detcomm.errors import UsageError
from tests import launch, launch_mpi

ASSOCIATIONS = ("tree", "linear", "ring")
RING_CHUNK_ELEMS = 7


def _probe_detcomm(rank: int, world_size: int, count: int) -> list[tuple[str, bool, str | None, list[str], int]]:
    """Probe each association by several collectives; what rank by rank must be alike."""
    from detcomm.association import Association
    from detcomm.collectives import Collective, DType
    from detcomm.options import Options
    from detcomm.probing import probe
    from detcomm.reducers import examine

    examined = examine("detcomm")
    found = []
    for name in ASSOCIATIONS:
        options = Options(association=name, ring_chunk_elems=RING_CHUNK_ELEMS)
        promised = Association(name, RING_CHUNK_ELEMS)
        with examined.opened(options=options) as reducer:
            assert reducer is not None
            for collective, dtype in (
                (Collective.ALL_REDUCE, DType.BFLOAT16),
                (Collective.REDUCE_SCATTER, DType.FLOAT32),
                (Collective.REDUCE, DType.FLOAT64),
            ):
                probed = probe(examined, reducer, collective, dtype, count, root=1)
                breaches = list(probed.breaches(promised))
                found.append((name, probed.explained, probed.precision, breaches, len(probed.ranges)))
    examined.close()
    return found


@pytest.mark.parametrize("world_size", [3, 5, 8])
def test_on_detcomm_the_promised_association_is_found(world_size: int) -> None:
    first, *others = launch.run(world_size, _probe_detcomm, 8 * world_size * RING_CHUNK_ELEMS)
    assert all(found == first for found in others)
    assert [name for name, *_ in first] == [name for name in ASSOCIATIONS for _ in range(3)]
    for name, explained, precision, breaches, num_ranges in first:
        assert explained
        assert not breaches
        assert precision in ("added in float32, rounded once", "added in float32", "added in float64")
        assert (num_ranges > 1) == (name == "ring")


def _sum_ranks_in_growing_groups(rank: int, world_size: int, backend: str) -> list[float | None]:
    """The sum over the group, of each process's rank, in groups of 1, 2, ... processes and then in reverse order."""
    import numpy as np

    from detcomm.collectives import Collective, DType, ReduceOp
    from detcomm.reducers import examine

    examined = examine(backend)
    sums: list[float | None] = []
    for order in [*(range(size) for size in range(1, world_size + 1)), range(world_size)[::-1]]:
        with examined.opened(order) as reducer:
            if reducer is None:
                sums.append(None)
                continue
            assert order[reducer.rank] == rank
            own = np.float32(rank + 1).reshape(1).view(np.uint8)
            result = reducer.reduce(Collective.ALL_REDUCE, ReduceOp.SUM, DType.FLOAT32, own)
            sums.append(float(result.view(np.float32)[0]))
    examined.close()
    return sums


@pytest.mark.parametrize("backend", ["detcomm", "gloo"])
def test_groups_of_some_ranks_follow_each_other(backend: str) -> None:
    told = launch.run(3, _sum_ranks_in_growing_groups, backend)
    assert told == [[1.0, 3.0, 6.0, 6.0], [None, 3.0, 6.0, 6.0], [None, None, 6.0, 6.0]]


def _detcomm(*arguments: str, exit_code: int = 0) -> str:
    code, output = launch_mpi.run_command([sys.executable, "-m", "detcomm", *arguments])
    assert code == exit_code, output
    return output


def test_gloo_adds_in_another_order_at_each_position(tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    output = _detcomm(
        *("probe", "--nproc", "4", "--backend", "gloo", "--sizes", "7,64", "--dtypes", "bfloat16"),
        *("--json", str(file)),
    )
    assert "(((2+3)+1)+0)" in output
    short, long = json.loads(file.read_text())["probings"]
    chains = ["(((2+3)+1)+0)", "(((0+3)+2)+1)", "(((0+1)+3)+2)", "(((1+2)+0)+3)"]
    assert [found["tree"] for found in short["ranges"]] == chains
    assert [found["start"] for found in short["ranges"]] == [0, 2, 4, 6]
    assert [found["tree"] for found in long["ranges"]] == chains
    assert [found["start"] for found in long["ranges"]] == [0, 16, 32, 48]  # element 6 has moved to another chain
    assert short["precision"] == long["precision"] == "rounded at each addition"


def test_an_order_that_was_not_expected_fails() -> None:
    output = _detcomm(
        *("probe", "--nproc", "3", "--backend", "gloo", "--sizes", "30", "--expect", "linear"), exit_code=1
    )
    assert "not as promised: linear [0,10): expected ((0+1)+2), got ((1+2)+0)" in output


def test_verify_passes_detcomm_and_shows_what_gloo_does_not_hold(tmp_path: Path) -> None:
    file = tmp_path / "verify.json"
    narrow = ("--quick", "--dtypes", "float32", "--ops", "sum,max", "--json", str(file))
    _detcomm("verify", "--nproc", "3", *narrow, "--association", "tree")
    verdict: dict[str, Any] = json.loads(file.read_text())
    assert verdict["holds"]
    assert {check["guarantee"] for check in verdict["checks"] if check["contract"] == "tree/1:float32"} == {
        *("rank", "run", "schedule", "size", "composition", "placement", "device", "spec", "control")
    }
    assert all(digest["got"] == digest["expected"] for digest in verdict["digests"].values())

    _detcomm("verify", "--nproc", "3", *narrow, "--backend", "gloo", exit_code=1)
    verdict = json.loads(file.read_text())
    assert not verdict["holds"]
    assert {failure["guarantee"] for failure in verdict["failures"]} >= {"size"}


@pytest.mark.mpi
def test_mpi_is_probed_under_its_own_launcher(tmp_path: Path) -> None:
    launch_mpi.mpirun()
    file = tmp_path / "probe.json"
    _detcomm(
        *("probe", "--nproc", "4", "--backend", "mpi", "--collective", "reduce_scatter", "--sizes", "64"),
        *("--json", str(file)),
    )
    (probed,) = json.loads(file.read_text())["probings"]
    assert probed["precision"] == "added in float32"
    assert probed["ranges"][-1]["stop"] == 64
    refused = _detcomm("probe", "--nproc", "2", "--backend", "mpi", "--dtypes", "bfloat16", exit_code=2)
    assert "MPI has no bfloat16" in refused


def test_a_backend_that_torch_does_not_know_is_refused() -> None:
    from detcomm.reducers import check_can_examine, examine

    for arguments, says in (
        (("carrier-pigeon",), "torch knows no 'carrier-pigeon'; it knows .*gloo.*, and mpi"),
        (("cpu:gloo,cuda:nckl",), "torch knows no 'nckl'"),
        (("gloo", "tpu"), "--device: expected cpu or cuda, got 'tpu'"),
        (("mpi", "cuda"), "MPI is examined on cpu"),
        (("nccl",), "--backend nccl needs --device cuda"),
        (("gloo", "cpu", ["no_such_module"]), "--import no_such_module: "),
    ):
        with pytest.raises(UsageError, match=says):
            check_can_examine(*arguments)  # before ranks are started
        with pytest.raises(UsageError, match=says):
            examine(*arguments)
