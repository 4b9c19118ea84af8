# SPDX-License-Identifier: Apache-2.0
"""Connecting a group's transport: all ranks get the same one, or all fall back, or all raise one text."""

import os
import re
import warnings
from contextlib import closing
from datetime import timedelta
from typing import Literal

import numpy as np
import pytest
import torch.distributed as dist

from detcomm import native, shared_memory_rendezvous, stock_gloo
from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.communicator import Communicator
from detcomm.connect import Site, connect
from detcomm.errors import PeerTimeoutError, TransportError
from detcomm.options import Options
from detcomm.transports.base import Parcel
from tests import inputs, launch, oracle

PATIENCE_S = 60.0
needs_native = pytest.mark.skipif(not native.available(), reason="shared memory needs the native library")


def _site(rank: int, hosts: str, timeout_s: float = PATIENCE_S) -> Site:
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, len(hosts), False, timedelta(seconds=PATIENCE_S))
    return Site(
        store=dist.PrefixStore("group", store),
        name="test",
        rank=rank,
        hosts=tuple(hosts),
        devices=tuple(stock_gloo.open_devices()),
        chunk_bytes=None,
        timeout=timedelta(seconds=timeout_s),
    )


def _reduce_over(rank: int, world_size: int, transport: str, hosts: str) -> tuple[str, bytes]:
    with closing(connect(_site(rank, hosts), Options(transport=transport))) as connected:
        communicator = Communicator(connected, Options(), 1, "test")
        contributions = inputs.make("float32", 1000, world_size, seed=4)
        own = inputs.bits(contributions[rank]).copy()
        communicator.run(Call(Collective.ALL_REDUCE, DType.FLOAT32, 1000, ReduceOp.SUM), own, own, timeout_s=PATIENCE_S)
        return connected.name, own.tobytes()


CASES = [
    ("gloo", "aaa", "gloo"),
    ("auto", "abc", "gloo"),
    ("auto", "a", "loopback"),
    pytest.param("auto", "aaa", "shared_memory", marks=needs_native),
    pytest.param("shared_memory", "aaaa", "shared_memory", marks=needs_native),
    pytest.param("auto", "aabb", "hybrid", marks=needs_native),
    pytest.param("auto", "abaab", "hybrid", marks=needs_native),
]


@pytest.mark.parametrize(("transport", "hosts", "name"), CASES)
def test_all_ranks_get_the_same_transport_and_the_promised_bits(transport: str, hosts: str, name: str) -> None:
    world_size = len(hosts)
    expected = inputs.bits(oracle.reduce(inputs.make("float32", 1000, world_size, seed=4), "float32", "sum"))
    results = launch.run(world_size, _reduce_over, transport, hosts)
    assert results == [(name, expected.tobytes())] * world_size


def _fail_on(
    rank: int, world_size: int, broken: int, transport: str, hosts: str, action: Literal["always", "error"] = "always"
) -> tuple[str, str]:
    """Connect while shared memory is broken on one rank: the transport's name or the error, and the warning."""

    def refuse(world_size: int, chunk_bytes: int | None) -> None:
        raise TransportError("there is no memory here")

    if rank == broken:
        shared_memory_rendezvous._make_segment = refuse
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        try:
            with closing(connect(_site(rank, hosts), Options(transport=transport))) as connected:
                outcome = connected.name
                room = np.zeros(world_size, dtype=np.uint8)
                room[rank] = 7
                call = Call(Collective.ALL_GATHER, DType.UINT8, world_size, shard_counts=(1,) * world_size)
                communicator = Communicator(connected, Options(), 1, "test")
                communicator.run(call, room[rank : rank + 1], room, timeout_s=PATIENCE_S)
                assert room.tolist() == [7] * world_size
        except TransportError as error:
            outcome = f"{type(error).__name__}: {error}"
    return outcome, "; ".join(str(one.message) for one in caught if "falling back" in str(one.message))


@needs_native
@pytest.mark.parametrize(("hosts", "tried"), [("aaa", "shared_memory"), ("aabb", "hybrid")])
def test_a_failure_of_one_rank_makes_all_fall_back_and_is_announced_once(hosts: str, tried: str) -> None:
    results = launch.run(len(hosts), _fail_on, 1, "auto", hosts)
    assert [outcome for outcome, _ in results] == ["gloo"] * len(hosts)
    announced = [warning for _, warning in results if warning]
    assert len(announced) == 1
    assert f"transport {tried} does not work: " in announced[0]
    assert "there is no memory here" in announced[0]


@needs_native
def test_a_transport_asked_for_by_name_has_no_fallback_and_one_text_on_all_ranks() -> None:
    results = launch.run(3, _fail_on, 1, "shared_memory", "aaa")
    (outcome,) = {outcome for outcome, _ in results}
    assert outcome.startswith("TransportError: group test: transport shared_memory does not work: ")
    assert "rank 1: there is no memory here" in outcome


@needs_native
def test_where_warnings_are_errors_no_rank_falls_back() -> None:
    results = launch.run(3, _fail_on, 1, "auto", "aaa", "error")
    (outcome,) = {outcome for outcome, _ in results}
    assert outcome.startswith("TransportError: group test: transport shared_memory does not work: ")
    assert "rank 1: there is no memory here" in outcome


def _wait_in_vain(rank: int, world_size: int) -> str:
    """Rank 3 waits for rank 1, which shares its host."""
    with closing(connect(_site(rank, "abab"), Options(transport="hybrid"))) as connected:
        try:
            if rank == 3:
                connected.exchange([], [Parcel(1, np.zeros(1, dtype=np.uint8))], 0.5)
        except TransportError as error:
            return str(error)
    return ""


@needs_native
def test_errors_inside_a_host_call_the_ranks_by_their_numbers_in_the_group() -> None:
    *others, text = launch.run(4, _wait_in_vain)
    assert others == [""] * 3
    assert re.match(r"rank 3 (waited 0.5 s for|lost) rank 1\b", text), text
    (outcome,) = {outcome for outcome, _ in launch.run(4, _fail_on, 3, "hybrid", "abab")}
    assert "rank 3: there is no memory here" in outcome


def _come_or_not(rank: int, world_size: int) -> str:
    if rank == 1:
        return ""
    try:
        connect(_site(rank, "abc", timeout_s=1.0), Options(transport="gloo")).close()
    except (TransportError, PeerTimeoutError) as error:
        return str(error)
    return "no error"


def test_a_rank_that_does_not_come_is_an_error_in_time() -> None:
    results = launch.run(3, _come_or_not)
    assert all("transport gloo" in text for text in (results[0], results[2]))
    # On a loaded machine the other one may be late as well.
    assert all(re.search(r"ranks? [0-9, -]*\b1\b|ranks 0-2", text) for text in (results[0], results[2]))


def _connect_over_mpi(rank: int, world_size: int) -> str:
    try:
        connect(_site(rank, "aa"), Options(transport="mpi")).close()
    except TransportError as error:
        return str(error)
    return "no error"


def test_mpi_is_refused_where_the_ranks_are_no_mpi_world() -> None:
    pytest.importorskip("mpi4py")
    (text,) = set(launch.run(2, _connect_over_mpi))
    assert "transport mpi does not work" in text
    assert "not those of one MPI world" in text
