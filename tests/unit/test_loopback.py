# SPDX-License-Identifier: Apache-2.0
"""The loopback transport keeps the contract of ``transports/base.py``."""

import random
import threading
import time

import numpy as np
import pytest

from detcomm.errors import PeerTimeoutError, TransportError
from detcomm.transports import loopback
from detcomm.transports.base import Parcel
from detcomm.transports.loopback import LoopbackHub, LoopbackTransport


def _bytes(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint8)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_messages_between_a_pair_match_in_posting_order(world_size: int) -> None:
    dice = random.Random(world_size)
    pauses = [[dice.random() * 0.002 for _ in range(8)] for _ in range(world_size)]

    def exchange_all(transport: LoopbackTransport) -> list[np.ndarray]:
        peers = [peer for peer in range(world_size) if peer != transport.rank]
        sends = [Parcel(peer, _bytes(transport.rank, peer, number)) for number in range(3) for peer in peers]
        rooms = [Parcel(peer, _bytes(0, 0, 0)) for peer in reversed(peers) for _ in range(3)]
        for _ in range(4):
            transport.exchange(sends, rooms, 60.0)
        return [room.data for room in rooms]

    results = loopback.run(world_size, exchange_all, delay=lambda rank, number: time.sleep(pauses[rank][number]))
    for rank, rooms in enumerate(results):
        peers = [peer for peer in reversed(range(world_size)) if peer != rank]
        expected = [[peer, rank, number] for peer in peers for number in range(3)]
        assert [room.tolist() for room in rooms] == expected


def test_empty_parcels_are_legal() -> None:
    def exchange_nothing(transport: LoopbackTransport) -> None:
        transport.exchange([Parcel(1 - transport.rank, _bytes())], [Parcel(1 - transport.rank, _bytes())], 60.0)
        transport.exchange([], [], 60.0)

    loopback.run(2, exchange_nothing)


def test_a_late_peer_is_named() -> None:
    def wait_for_two(transport: LoopbackTransport) -> str:
        if transport.rank != 0:
            return ""
        with pytest.raises(PeerTimeoutError) as caught:
            transport.exchange([], [Parcel(1, _bytes(0)), Parcel(2, _bytes(0))], 0.05)
        return str(caught.value)

    hub = LoopbackHub(3)
    assert "ranks [1, 2]" in wait_for_two(hub.transports[0])


def test_sizes_must_match() -> None:
    hub = LoopbackHub(2)
    hub.transports[0].exchange([Parcel(1, _bytes(1, 2))], [], 1.0)
    with pytest.raises(TransportError, match="rank 0 sent 2 bytes where rank 1 expected 3"):
        hub.transports[1].exchange([], [Parcel(0, _bytes(0, 0, 0))], 1.0)


def test_what_was_sent_before_closing_arrives_and_then_the_peer_is_lost() -> None:
    hub = LoopbackHub(2)
    hub.transports[0].exchange([Parcel(1, _bytes(7))], [], 1.0)
    hub.transports[0].close()
    hub.transports[0].close()
    room = _bytes(0)
    hub.transports[1].exchange([], [Parcel(0, room)], 1.0)
    assert room.tolist() == [7]
    with pytest.raises(TransportError, match="rank 0 is lost: rank 0 closed its transport"):
        hub.transports[1].exchange([], [Parcel(0, room)], 60.0)


def test_abort_wakes_the_rank_and_its_peers() -> None:
    hub = LoopbackHub(3)
    caught: dict[int, str] = {}

    def wait(rank: int) -> None:
        peers = [peer for peer in range(3) if peer != rank]
        with pytest.raises(TransportError) as error:
            hub.transports[rank].exchange([], [Parcel(peer, _bytes(0)) for peer in peers], 600.0)
        caught[rank] = str(error.value)

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    hub.transports[1].abort("the watch saw rank 2 die")
    for thread in threads:
        thread.join(60.0)
    assert caught == {0: "rank 1 is lost: the watch saw rank 2 die", 1: "the watch saw rank 2 die"}
    with pytest.raises(TransportError, match="the watch saw"):
        hub.transports[1].exchange([], [], 1.0)


def test_run_raises_the_first_error_and_nobody_waits_for_the_rank_that_raised() -> None:
    def fail_on_one(transport: LoopbackTransport) -> None:
        if transport.rank == 1:
            raise ValueError("a bug of this rank")
        transport.exchange([], [Parcel(1, _bytes(0))], 600.0)

    with pytest.raises(ValueError, match="a bug of this rank"):
        loopback.run(3, fail_on_one)
