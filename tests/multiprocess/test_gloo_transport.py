# SPDX-License-Identifier: Apache-2.0
"""The gloo transport between processes: order, empty and large messages, lost and late peers, abort."""

import os
import signal
import threading
import time
from datetime import timedelta
from itertools import count

import numpy as np
import pytest
import torch.distributed as dist

from detcomm import stock_gloo, testing
from detcomm.errors import PeerTimeoutError, TransportError
from detcomm.transports.base import Parcel
from detcomm.transports.gloo import GlooTransport
from tests import launch
from tests.launch import Died

PATIENCE_S = 120.0
NEVER_S = 90.0
"""A timeout that nothing waits for: what ends sooner was woken."""


def _store(world_size: int) -> dist.TCPStore:
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore("127.0.0.1", port, world_size, False, timedelta(seconds=PATIENCE_S))


def _connect(rank: int, world_size: int, prefix: str = "test") -> GlooTransport:
    store = _store(world_size)
    devices = stock_gloo.open_devices()
    group = stock_gloo.connect_mesh(devices, store, prefix, rank, world_size, timedelta(seconds=PATIENCE_S))
    return GlooTransport(group, rank, world_size)


def _pattern(src: int, dst: int, number: int, size: int) -> np.ndarray:
    return ((np.arange(size) * 7 + src * 31 + dst * 57 + number * 101) % 251).astype(np.uint8)


def _exchange_patterns(rank: int, world_size: int, sizes: list[int]) -> bool:
    transport = _connect(rank, world_size)
    peers = [peer for peer in range(world_size) if peer != rank]
    ok = True
    for _ in range(2):
        sends = [
            Parcel(peer, _pattern(rank, peer, number, size)) for number, size in enumerate(sizes) for peer in peers
        ]
        rooms = [Parcel(peer, np.zeros(size, dtype=np.uint8)) for peer in reversed(peers) for size in sizes]
        transport.exchange(sends, rooms, PATIENCE_S)
        expected = [_pattern(peer, rank, number, size) for peer in reversed(peers) for number, size in enumerate(sizes)]
        ok = ok and all(np.array_equal(room.data, want) for room, want in zip(rooms, expected, strict=True))
    transport.close()
    transport.close()
    return ok


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_messages_between_a_pair_match_in_posting_order(world_size: int) -> None:
    sizes = [4, 0, 300_001, 1, 65537]
    assert launch.run(world_size, _exchange_patterns, sizes) == [True] * world_size


def _wait_for_everybody(rank: int, world_size: int, timeout_s: float, dying: int, silent: int) -> str:
    transport = _connect(rank, world_size)
    peers = [peer for peer in range(world_size) if peer != rank]
    rooms = [Parcel(peer, np.zeros(8, dtype=np.uint8)) for peer in peers]
    transport.exchange([Parcel(peer, np.zeros(8, dtype=np.uint8)) for peer in peers], rooms, PATIENCE_S)
    if rank == dying:
        os._exit(9)
    store = _store(world_size)
    if rank == silent:
        store.wait(["noticed"])
        return ""
    sends = [Parcel(peer, np.zeros(8, dtype=np.uint8)) for peer in peers]
    try:
        transport.exchange(sends, rooms, timeout_s)
    except TransportError as error:
        text = f"{type(error).__name__}: {error}"
        store.set("noticed", "")
        transport.abort(text)
        with pytest.raises(TransportError):
            transport.exchange([], rooms, timeout_s)
        return text
    return "no error"


def test_a_dead_peer_is_named_at_once() -> None:
    # Two ranks: with more, the rank that dies is named by some and its mourners' closed connections by others.
    results = launch.run(2, _wait_for_everybody, PATIENCE_S, 1, -1, may_die=True)
    assert isinstance(results[1], Died)
    assert results[0].startswith("TransportError: rank 0 lost rank 1: ")


def test_a_silent_peer_is_named_at_the_timeout() -> None:
    results = launch.run(2, _wait_for_everybody, 0.5, -1, 1)
    assert results[0] == "PeerTimeoutError: rank 0 waited 0.5 s for ranks [1]"


def _wait_and_abort(rank: int, world_size: int) -> str:
    transport = _connect(rank, world_size)
    peers = [peer for peer in range(world_size) if peer != rank]
    if rank == 0:
        threading.Timer(0.3, transport.abort, ("rank 2 is on fire",)).start()
    rooms = [Parcel(peer, np.zeros(8, dtype=np.uint8)) for peer in peers]
    try:
        transport.exchange([], rooms, PATIENCE_S)
    except PeerTimeoutError:
        return "late"
    except TransportError as error:
        transport.abort(str(error))  # what a communicator does: the error goes round
        return str(error)
    return "no error"


def test_abort_wakes_this_rank_and_then_all_others() -> None:
    results = launch.run(3, _wait_and_abort)
    assert results[0] == "rank 2 is on fire"
    assert all("lost rank" in text for text in results[1:])


MESSAGE_BYTES = 64 << 20


def _lose_the_peer_within_a_message(rank: int, world_size: int) -> str:
    """Rank 1 is killed as soon as the first of its bytes have come, and then the transport is told."""
    transport = _connect(rank, world_size)
    store = _store(world_size)
    if rank == 1:
        store.set("process", str(os.getpid()))
        transport.exchange([Parcel(0, np.ones(MESSAGE_BYTES, dtype=np.uint8))], [], NEVER_S)
        store.wait(["done"])
        return ""
    room = np.zeros(MESSAGE_BYTES, dtype=np.uint8)
    peer = int(store.get("process"))

    def kill_and_tell() -> None:
        while not room[0]:
            pass
        os.kill(peer, signal.SIGKILL)
        time.sleep(0.5)  # gloo sees the end of the connection
        transport.abort("rank 1 died")

    killer = threading.Thread(target=kill_and_tell)
    killer.start()
    started = time.monotonic()
    try:
        transport.exchange([], [Parcel(1, room)], NEVER_S)
    except TransportError as error:
        is_woken = time.monotonic() - started < NEVER_S
        return f"{error}; half received: {not room[-1]}; woken: {is_woken}"
    finally:
        killer.join()
    return "whole"


def test_who_has_received_half_a_message_is_woken() -> None:
    """gloo itself tells only those of whose message no byte has moved yet."""
    for _ in range(10):  # on a busy machine the message may be whole before the kill
        results = launch.run(2, _lose_the_peer_within_a_message, may_die=True)
        if results[0] != "whole":
            break
    assert results[0] == "rank 1 died; half received: True; woken: True"


def _check_contract(rank: int, world_size: int) -> None:
    meshes = count()
    testing.check_transport(lambda: _connect(rank, world_size, f"mesh {next(meshes)}"))


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_contract_of_transports_is_kept(world_size: int) -> None:
    launch.run(world_size, _check_contract)
