# SPDX-License-Identifier: Apache-2.0
"""What a group holds of a store is let go with the group, failed or not: nothing is in the way of the next store."""

import gc
import os
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import detcomm
from detcomm import store_access
from tests import launch
from tests.torch_tensors import PATIENCE, group

HOST = "127.0.0.1"
ENDS = ("well", "a late rank", "a call after an abort", "a work after an abort", "a mismatch")


def _end(how: str, rank: int) -> None:
    value = torch.ones(4)
    if how == "a late rank":
        dist.group.WORLD.set_timeout(timedelta(seconds=0.3))
        if rank == 0:
            with pytest.raises(detcomm.PeerTimeoutError):
                dist.all_reduce(value)
        return
    dist.all_reduce(value)
    if how == "a mismatch":
        with pytest.raises(detcomm.MismatchError):
            dist.broadcast(value, rank)
    elif "abort" in how:
        if rank == 0:
            dist.group.WORLD.abort()
        with pytest.raises(detcomm.TransportError):
            _call(value, "work" in how)


def _call(value: torch.Tensor, asynchronous: bool) -> None:
    if asynchronous:
        dist.all_reduce(value, async_op=True).wait()
    else:
        dist.broadcast(value, 0)


class _Meeting:
    """The launcher's store, which outlives those that are tested."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.store = dist.TCPStore(HOST, int(os.environ["MASTER_PORT"]), world_size, False, PATIENCE)
        self._rank, self._world_size = rank, world_size

    def pass_barrier(self, name: str) -> None:
        self.store.set(f"{name}/{self._rank}", "")
        self.store.wait([f"{name}/{other}" for other in range(self._world_size)], PATIENCE)


def _let_go(rank: int, world_size: int) -> list[str]:
    """Without the garbage collector: which ends leave a connection or the store's server behind."""
    meeting = _Meeting(rank, world_size)
    kept = []
    gc.disable()
    for how in ENDS:
        store = dist.TCPStore(HOST, 0, world_size, True, PATIENCE, wait_for_workers=False) if rank == 0 else None
        if store is not None:
            meeting.store.set(f"port of {how}", str(store.port))
        port = int(meeting.store.get(f"port of {how}"))
        if store is None:
            store = dist.TCPStore(HOST, port, world_size, False, PATIENCE)
        with group(store=store, rank=rank, world_size=world_size):
            _end(how, rank)
            meeting.pass_barrier(f"called {how}")
        del store
        if list(store_access._shared):
            kept.append(f"{how}: the connection")
        if store_access._listens_on.__wrapped__(port, os.getpid()):
            kept.append(f"{how}: the server")
        meeting.pass_barrier(f"ended {how}")
    gc.enable()
    return kept


def test_neither_connection_nor_server_waits_for_the_garbage_collector() -> None:
    assert launch.run(2, _let_go) == [[], []]


def _one_after_the_other(rank: int, world_size: int) -> list[float]:
    """Two stores at one address; somebody still holds the first one's connection when the second is there."""
    meeting = _Meeting(rank, world_size)
    listener = None
    if rank == 0:  # held, so that nobody else gets the port in between
        listener = socket.create_server((HOST, 0))
        meeting.store.set("port", str(listener.getsockname()[1]))
    port = int(meeting.store.get("port"))
    results: list[float] = []
    held: list[Any] = []
    for turn in range(2):
        server: dict[str, Any] = {} if listener is None else {"master_listen_fd": os.dup(listener.fileno())}
        store = dist.TCPStore(HOST, port, world_size, rank == 0, PATIENCE, wait_for_workers=False, **server)
        with group(store=store, rank=rank, world_size=world_size):
            value = torch.ones(4)
            dist.all_reduce(value)
            results.append(float(value[0]))
            held += store_access._shared.values()
        del store
        meeting.pass_barrier(f"ended {turn}")
    assert len(held) == 2
    return results


def test_a_store_at_the_address_of_an_earlier_one_is_another_one() -> None:
    assert launch.run(2, _one_after_the_other) == [[2.0, 2.0]] * 2
