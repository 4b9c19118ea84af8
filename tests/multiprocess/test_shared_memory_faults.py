# SPDX-License-Identifier: Apache-2.0
"""Shared memory when things go wrong: differing calls, lost and stopped peers, aborts, a rank that cannot take part."""

import os
import re
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from detcomm import testing
from detcomm.association import LINEAR, TREE, Association
from detcomm.call import Call
from detcomm.collectives import Accumulate, Collective, DType, ReduceOp
from detcomm.errors import MismatchError, PeerTimeoutError, TransportError
from detcomm.transports.base import Parcel
from detcomm.transports.shared_memory import SharedMemoryTransport
from tests import launch
from tests.launch import Died
from tests.multiprocess.shared_memory_ranks import PATIENCE_S, connect, connect_store, connected

COUNT = 300
GOOD = Call(Collective.ALL_REDUCE, DType.FLOAT32, COUNT, ReduceOp.SUM)


def _reduce(
    transport: SharedMemoryTransport,
    call: Call = GOOD,
    association: Association = TREE,
    accumulate: Accumulate = "float32",
    *,
    label: str = "",
    timeout_s: float = PATIENCE_S,
) -> np.ndarray:
    rank = transport.rank
    input = np.ones(call.input_count(rank) * call.dtype.itemsize, np.uint8)
    output = np.full(call.output_count(rank) * call.dtype.itemsize, 0xA5, np.uint8)
    collectives = transport.native_collectives
    assert collectives is not None
    factor = 1.0 if call.op is ReduceOp.PREMUL_SUM else None
    try:
        collectives.run(call, association, accumulate, input, output, factor=factor, label=label, timeout_s=timeout_s)
    except MismatchError:
        assert (output == 0xA5).all(), "a mismatch must write nothing"
        raise
    return output


def _shards(world_size: int, first: int) -> tuple[int, ...]:
    return (first, *[10] * (world_size - 2), 10 * world_size - first - 10 * (world_size - 2))


def _disagree(rank: int, world_size: int, odd: int) -> list[str]:
    """In each round one rank calls something else; all must say so alike, and go on."""
    scatter = Call(Collective.REDUCE_SCATTER, DType.FLOAT32, 10 * world_size, ReduceOp.SUM, _shards(world_size, 10))
    other_shards = Call(Collective.REDUCE_SCATTER, DType.FLOAT32, 10 * world_size, ReduceOp.SUM, _shards(world_size, 9))
    reduce = Call(Collective.REDUCE, DType.FLOAT32, COUNT, ReduceOp.SUM, root=0)
    pairs: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [
        ((GOOD,), (Call(Collective.ALL_REDUCE, DType.FLOAT32, COUNT + 1, ReduceOp.SUM),)),
        ((GOOD,), (Call(Collective.ALL_REDUCE, DType.FLOAT32, 1 << 20, ReduceOp.SUM),)),
        ((GOOD,), (Call(Collective.ALL_REDUCE, DType.FLOAT32, 0, ReduceOp.SUM),)),
        ((GOOD,), (Call(Collective.ALL_REDUCE, DType.INT32, COUNT, ReduceOp.SUM),)),
        ((GOOD,), (Call(Collective.ALL_REDUCE, DType.FLOAT32, COUNT, ReduceOp.MAX),)),
        ((GOOD,), (Call(Collective.ALL_REDUCE, DType.FLOAT32, COUNT, ReduceOp.PREMUL_SUM),)),
        ((GOOD,), (reduce,)),
        ((reduce,), (Call(Collective.REDUCE, DType.FLOAT32, COUNT, ReduceOp.SUM, root=1),)),
        ((GOOD,), (scatter,)),
        ((scatter,), (other_shards,)),
        ((GOOD, TREE), (GOOD, LINEAR)),
        ((GOOD, TREE, "float32"), (GOOD, TREE, "wire")),
    ]
    texts = []
    with connected(rank, world_size) as transport:
        for usual, unusual in pairs:
            with pytest.raises(MismatchError) as raised:
                _reduce(transport, *(unusual if rank == odd else usual))
            texts.append(str(raised.value))
            _reduce(transport)
        with pytest.raises(MismatchError) as raised:
            _reduce(transport, label="complex64" if rank == odd else "")
        texts.append(str(raised.value))
        collectives = transport.native_collectives
        assert collectives is not None
        with pytest.raises(MismatchError) as raised:
            collectives.agree("two calls", PATIENCE_S) if rank == odd else _reduce(transport)
        texts.append(str(raised.value))
        blocks = [f"call {number}" for number in range(900)]  # longer than one round of texts
        blocks[700] = f"something of rank {rank == odd}"
        with pytest.raises(MismatchError, match="on call 701 of a coalesced block"):
            collectives.agree("\n".join(blocks), PATIENCE_S)
        collectives.agree("the same", PATIENCE_S)
        _reduce(transport)
    return texts


@pytest.mark.parametrize(("world_size", "odd"), [(2, 0), (3, 1), (5, 4)])
def test_a_differing_call_is_named_on_every_rank_and_writes_nothing(world_size: int, odd: int) -> None:
    texts = launch.run(world_size, _disagree, odd)
    assert all(text == texts[0] for text in texts)
    assert all(f"rank {odd}: " in text for text in texts[0])
    assert "float32[300]" in texts[0][0]
    assert "float32[301]" in texts[0][0]
    assert "linear/1:float32" in texts[0][10]


def _lose_one(rank: int, world_size: int, odd: int, how: int, num_before: int, timeout_s: float) -> tuple[str, float]:
    transport = connect(rank, world_size)
    for _ in range(num_before):
        _reduce(transport)
    large = Call(Collective.ALL_REDUCE, DType.FLOAT32, 1 << 22, ReduceOp.SUM)
    if rank == odd:
        threading.Timer(0.05, os.kill, (os.getpid(), how)).start()
    start = time.monotonic()
    try:
        for _ in range(10_000):
            start = time.monotonic()
            _reduce(transport, large, timeout_s=timeout_s)
    except TransportError as error:
        elapsed = time.monotonic() - start
        with pytest.raises(type(error)):
            _reduce(transport, timeout_s=timeout_s)  # at once, not after another timeout
        transport.close()
        return f"{type(error).__name__}: {error}", elapsed
    return "no error", 0.0


@pytest.mark.parametrize("odd", [0, 1, 2, 3])
def test_a_killed_rank_is_named_by_all_others(odd: int) -> None:
    results = launch.run(4, _lose_one, odd, signal.SIGKILL, odd, 60.0, may_die=True)
    assert isinstance(results[odd], Died)
    for rank, result in enumerate(results):
        if rank != odd:
            text, elapsed = result
            print(f"rank {rank} after {elapsed:.3f} s: {text}")
            assert text.startswith("TransportError: ")
            assert f"lost rank {odd}" in text
            assert elapsed < 30.0  # far from the timeout of a minute; the figure above tells the truth


def _stall(rank: int, world_size: int, odd: int) -> str:
    store = connect_store()
    with connected(rank, world_size) as transport:
        _reduce(transport)
        if rank == odd:  # comes only when all others have given up
            others = [f"gave up/{peer}" for peer in range(world_size) if peer != odd]
            store.wait(others, timedelta(seconds=PATIENCE_S))
        with pytest.raises(PeerTimeoutError) as raised:
            _reduce(transport, timeout_s=PATIENCE_S if rank == odd else 1.0)
        store.set(f"gave up/{rank}", "")
        with pytest.raises(PeerTimeoutError):
            _reduce(transport)
        return str(raised.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_stalled_rank_is_named_at_the_timeout_on_all_ranks(world_size: int) -> None:
    for text in launch.run(world_size, _stall, 1):
        assert re.search(r"waited( 1 s)? for ranks? (0, )?1\b", text), text  # a slow machine may make others late too


def _abort(rank: int, world_size: int, odd: int) -> str:
    with connected(rank, world_size) as transport:
        _reduce(transport)
        if rank == odd:
            threading.Timer(0.1, transport.abort, ("had enough",)).start()
            with pytest.raises(TransportError) as raised:
                transport.exchange([], [Parcel(0, np.zeros(8, np.uint8))], PATIENCE_S)
        else:
            with pytest.raises(TransportError) as raised:
                _reduce(transport)
        assert not isinstance(raised.value, PeerTimeoutError)
        return str(raised.value)


def test_an_abort_ends_the_waits_of_all_ranks() -> None:
    texts = launch.run(3, _abort, 2)
    assert texts[2] == "had enough"
    assert all("rank 2 gave up: had enough" in text for text in texts[:2])


def _leave(rank: int, world_size: int) -> str:
    transport = connect(rank, world_size)
    _reduce(transport)
    if rank == 0:
        transport.close()
        with pytest.raises(TransportError, match="closed"):
            _reduce(transport)
        return ""
    with pytest.raises(TransportError) as raised:
        _reduce(transport)
    transport.close()
    return str(raised.value)


def test_a_rank_that_has_left_is_a_lost_peer() -> None:
    assert all("lost rank 0: it has left the group" in text for text in launch.run(3, _leave)[1:])


def _keep_the_contract(rank: int, world_size: int) -> str:
    testing.check_transport(lambda: connect(rank, world_size))
    return "ok"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_transport_keeps_the_contract_of_exchange(world_size: int) -> None:
    assert launch.run(world_size, _keep_the_contract) == ["ok"] * world_size
