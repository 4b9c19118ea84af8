# SPDX-License-Identifier: Apache-2.0
"""Each transport, forced by name, between processes: a pairwise covering of all calls, and the public check."""

from pathlib import Path

import pytest

from detcomm import native
from tests import launch, launch_mpi
from tests.multiprocess import covering_ranks

needs_native = pytest.mark.skipif(not native.available(), reason=f"no native library: {native.why_not()}")

SITES = [
    pytest.param("gloo", ("a", "b", "c"), id="gloo-3"),
    pytest.param("gloo", ("a", "a", "a", "b", "b"), id="gloo-5"),
    pytest.param("shared_memory", ("a",) * 3, id="shared_memory-3", marks=needs_native),
    pytest.param("shared_memory", ("a",) * 5, id="shared_memory-5", marks=needs_native),
    pytest.param("hybrid", ("a", "a", "b", "b", "b"), id="hybrid-2+3", marks=needs_native),
]
"""Transport and each rank's host: as the group believes it, all ranks run on this machine."""


@pytest.mark.parametrize(("transport", "hosts"), SITES)
def test_covering(transport: str, hosts: tuple[str, ...]) -> None:
    world_size = len(hosts)
    done = launch.run(world_size, covering_ranks.over, transport, hosts)
    assert done == [covering_ranks.num_calls(world_size)] * world_size


@pytest.mark.parametrize(("transport", "hosts"), SITES[::2])
def test_public_check(transport: str, hosts: tuple[str, ...]) -> None:
    launch.run(len(hosts), covering_ranks.check_transport, transport, hosts)


@pytest.mark.mpi
def test_covering_over_mpi() -> None:
    world_size = 5
    done = launch_mpi.run(world_size, covering_ranks.over_mpi)
    assert done == [covering_ranks.num_calls(world_size)] * world_size


@pytest.mark.mpi
@needs_native
def test_covering_over_mpi_between_hosts(tmp_path: Path) -> None:
    hosts = ("a", "a", "b", "b", "b")
    done = launch_mpi.run(len(hosts), covering_ranks.over_mpi_between_hosts, hosts, str(tmp_path))
    assert done == [covering_ranks.num_calls(len(hosts))] * len(hosts)
