# SPDX-License-Identifier: Apache-2.0
"""The hybrid transport over two layers of loopback: routing, reductions, and the fate of both layers."""

from collections.abc import Callable
from contextlib import closing
from threading import Thread

import numpy as np
import pytest

from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.communicator import Communicator
from detcomm.errors import PeerTimeoutError, TransportError
from detcomm.options import Options
from detcomm.transports.base import Bytes, Parcel
from detcomm.transports.hybrid import HybridTransport
from detcomm.transports.loopback import LoopbackHub
from tests import inputs, oracle

PATIENCE_S = 60.0
PLACEMENTS = ["aabb", "aabbb", "abab", "aaab", "aaaabbbb", "abcabc", "aabbccc"]


def make_transports(hosts: str) -> list[HybridTransport]:
    """A rank for each letter, which names its host."""
    remote = LoopbackHub(len(hosts))
    ranks_of = {host: [rank for rank, other in enumerate(hosts) if other == host] for host in hosts}
    locals_ = {host: LoopbackHub(len(ranks)) for host, ranks in ranks_of.items()}
    return [
        HybridTransport(
            locals_[host].transports[ranks_of[host].index(rank)] if len(ranks_of[host]) > 1 else None,
            ranks_of[host],
            remote.transports[rank],
        )
        for rank, host in enumerate(hosts)
    ]


def run_ranks(hosts: str, body: Callable[[HybridTransport], object]) -> list[object]:
    results: dict[int, object] = {}

    def on_rank(transport: HybridTransport) -> None:
        with closing(transport):
            results[transport.rank] = body(transport)

    threads = [Thread(target=on_rank, args=(transport,)) for transport in make_transports(hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(len(hosts))]


@pytest.mark.parametrize("hosts", PLACEMENTS)
def test_each_parcel_reaches_its_peer(hosts: str) -> None:
    def body(transport: HybridTransport) -> list[list[int]]:
        peers = [peer for peer in range(len(hosts)) if peer != transport.rank]
        rooms = [Parcel(peer, np.zeros(2, dtype=np.uint8)) for peer in peers]
        sends = [Parcel(peer, np.array([transport.rank, peer], dtype=np.uint8)) for peer in peers]
        transport.exchange(sends, rooms, PATIENCE_S)
        return [room.data.tolist() for room in rooms]

    for rank, received in enumerate(run_ranks(hosts, body)):
        assert received == [[peer, rank] for peer in range(len(hosts)) if peer != rank]


@pytest.mark.parametrize("schedule", ["auto", "direct", "halving", "hierarchical", "oneshot"])
@pytest.mark.parametrize("hosts", PLACEMENTS)
def test_the_placement_does_not_reach_the_bits(hosts: str, schedule: str) -> None:
    world_size = len(hosts)
    contributions = inputs.make("bfloat16", 611, world_size, seed=world_size)
    expected = inputs.bits(oracle.reduce(contributions, "bfloat16", "sum"))

    def body(transport: HybridTransport) -> Bytes:
        communicator = Communicator(transport, Options(schedule=schedule, chunk_bytes=256), 2, "test")
        own = inputs.bits(contributions[transport.rank]).copy()
        call = Call(Collective.ALL_REDUCE, DType.BFLOAT16, 611, ReduceOp.SUM)
        communicator.run(call, own, own, timeout_s=PATIENCE_S)
        return own

    for output in run_ranks(hosts, body):
        np.testing.assert_array_equal(output, expected)


def test_a_late_peer_on_another_host_is_named() -> None:
    transports = make_transports("abab")
    with pytest.raises(PeerTimeoutError, match=r"rank 3 waited .* ranks \[2\]"):
        transports[3].exchange([], [Parcel(2, np.zeros(1, dtype=np.uint8))], 0.01)


@pytest.mark.parametrize("peer", [1, 2])
def test_abort_and_close_reach_both_layers(peer: int) -> None:
    for end in (lambda transport: transport.abort("an accident"), lambda transport: transport.close()):
        transports = make_transports("aabb")
        end(transports[0])
        room = Parcel(0, np.zeros(1, dtype=np.uint8))
        with pytest.raises(TransportError, match="rank 0 is lost"):
            transports[peer].exchange([], [room], PATIENCE_S)
        with pytest.raises(TransportError):
            transports[0].exchange([], [Parcel(peer, room.data)], PATIENCE_S)
