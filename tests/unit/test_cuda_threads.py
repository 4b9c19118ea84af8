# SPDX-License-Identifier: Apache-2.0
"""Groups used from several threads; exchanges of fake GPUs wait for the peer inside the call, as NCCL's first do."""

import threading
import time
from typing import Any

import numpy as np
import pytest

from detcomm.errors import PeerTimeoutError
from detcomm.options import Options
from detcomm.request import Request
from tests import fake_communicators as fake
from tests import fake_gpu, inputs, oracle
from tests.fake_communicators import CALL, STREAMS

pytestmark = fake_gpu.needs_native

DIRECT = Options(schedule="direct")


def _begin(world: fake.World, world_of_driver: fake.World, rank: int, memory: Any, timeout_s: float) -> Any:
    """An all-reduce of one rank, on a thread of its own."""

    def work() -> None:
        world_of_driver.here.gpu = world.gpus[rank]
        request = Request(CALL, fake.memory(memory), fake.memory(memory), None)
        world.communicators[rank].run_many([request], STREAMS, capturing=False, timeout_s=timeout_s, kept=[])

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _wait_until_inside(world: fake.World, rank: int) -> None:
    deadline = time.monotonic() + fake_gpu.TIMEOUT_S
    while not any(name == "ncclGroupEnd" for name, *_ in world.gpus[rank].calls):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_groups_that_connect_in_different_orders_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 connects one group first and rank 1 the other; each holds the lock of its device while it waits."""
    worlds = [fake.World(2, DIRECT, monkeypatch) for _ in range(2)]
    driver = worlds[-1]  # that which ``driver()`` asks
    given = inputs.make("float32", 1003, 2)
    data = [[inputs.bits(array).copy() for array in given] for _ in worlds]
    threads = []
    for rank in range(2):
        threads.append(_begin(worlds[rank], driver, rank, data[rank][rank], 60.0))
        _wait_until_inside(worlds[rank], rank)
    for rank in range(2):
        threads.append(_begin(worlds[1 - rank], driver, rank, data[1 - rank][rank], 60.0))
    for thread in threads:
        thread.join(fake_gpu.TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)
    expected = inputs.bits(oracle.reduce(given, "float32", "sum"))
    for memory in (memory for world in data for memory in world):
        assert np.array_equal(memory, expected)


def test_who_waits_for_a_peer_inside_a_call_is_late_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the call is named, though it has not been issued."""
    world = fake.World(2, DIRECT, monkeypatch)
    data = [inputs.bits(array).copy() for array in inputs.make("float32", 1003, 2)]
    first = _begin(world, world, 0, data[0], timeout_s=0.01)
    _wait_until_inside(world, 0)
    time.sleep(0.05)
    world.here.gpu = world.gpus[0]
    with pytest.raises(PeerTimeoutError, match=r"collective #1, all_reduce\(sum, float32\[1003\]\), is not done"):
        world.communicators[0].poll()
    assert world.communicators[0].oldest.sequence == 1
    second = _begin(world, world, 1, data[1], timeout_s=60.0)
    for thread in (first, second):
        thread.join(fake_gpu.TIMEOUT_S)
        assert not thread.is_alive()
    world.communicators[0].poll()
    assert world.communicators[0].oldest is None
