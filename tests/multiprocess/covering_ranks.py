# SPDX-License-Identifier: Apache-2.0
"""What a rank of the covering tests does: connect by one transport, then run a covering of all calls over it."""

import os
from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta

from torch.distributed import FileStore, PrefixStore, TCPStore

from detcomm import stock_gloo, testing
from detcomm.communicator import Communicator
from detcomm.connect import Site, connect
from detcomm.options import Options
from detcomm.transports.base import Transport
from tests.conformance import run
from tests.conformance.sample import Sample

PATIENCE_S = 120.0


def num_calls(world_size: int) -> int:
    """How many calls each rank must report."""
    return len(_sample(world_size).rows())


def over(rank: int, world_size: int, transport: str, hosts: Sequence[str]) -> int:
    """Run the covering over a transport that is forced by name; the number of calls, all of which agreed."""
    site = _site(rank, hosts, "covering")
    with closing(connect(site, Options(transport=transport))) as connected:
        assert connected.name == transport
        return _run(connected)


def over_mpi(rank: int, world_size: int) -> int:
    """Run the covering over MPI; for a rank that mpirun has started."""
    from detcomm.transports.mpi import MpiTransport, create_communicator

    with closing(MpiTransport(create_communicator(range(world_size), 1))) as transport:
        assert transport.rank == rank
        return _run(transport)


def over_mpi_between_hosts(rank: int, world_size: int, hosts: Sequence[str], folder: str) -> int:
    """Run the covering over shared memory inside hosts and MPI between; for a rank that mpirun has started."""
    timeout = timedelta(seconds=PATIENCE_S)
    store = FileStore(f"{folder}/store", world_size)
    site = Site(store, "covering", rank, tuple(hosts), (), None, timeout)
    with closing(connect(site, Options(transport="hybrid_mpi"))) as connected:
        assert connected.name == "hybrid"
        return _run(connected)


def check_transport(rank: int, world_size: int, transport: str, hosts: Sequence[str]) -> None:
    """The public check, over fresh transports forced by name."""
    names = iter(f"check {number}" for number in range(1000))
    testing.check_transport(lambda: connect(_site(rank, hosts, next(names)), Options(transport=transport)))


def _sample(world_size: int) -> Sample:
    counts = (1, world_size - 1, world_size + 1, 1000, 0, 65537)
    return Sample(counts=counts, world_sizes=(world_size,), chunk_bytes=(None, 1024))


def _run(transport: Transport) -> int:
    calls = _sample(transport.world_size).calls()
    for _, way, case in calls:
        communicator = Communicator(transport, way.options, way.block_size, "covering")
        run.check(communicator, way, [case], batch=1)
    return len(calls)


def _site(rank: int, hosts: Sequence[str], name: str) -> Site:
    timeout = timedelta(seconds=PATIENCE_S)
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore("127.0.0.1", port, None, False, timeout, wait_for_workers=False)
    # A prefix of its own: the attempts of two sites must not read each other's verdicts.
    return Site(PrefixStore(name, store), name, rank, tuple(hosts), tuple(stock_gloo.open_devices()), None, timeout)
