# SPDX-License-Identifier: Apache-2.0
"""Groups whose ranks share fake device memory: connected, called, captured, refused, kept waiting."""

import time
from typing import Any

import numpy as np
import pytest

from detcomm.call import Call, even_shards
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.cuda.peer import residency
from detcomm.errors import PeerTimeoutError, UsageError
from detcomm.memory import DeviceMemory
from detcomm.options import Options
from detcomm.request import Request
from tests import fake_gpu, host_kernels, inputs, oracle
from tests.fake_communicators import CALL, STREAMS, World, memory, run

pytestmark = [
    fake_gpu.needs_native,
    pytest.mark.skipif(host_kernels.COMPILER is None, reason="no C++ compiler here"),
]

COUNT = 9001
"""Elements of more than goes by the oneshot schedule."""

PEER = Options(cuda_transport="peer", scratch_bytes=1 << 20)


@pytest.mark.parametrize(("world_size", "block_size"), [(2, 2), (3, 4), (5, 2), (8, 8)])
@pytest.mark.parametrize("op", ["sum", "premul_sum"])
def test_all_reduce_on_every_rank(world_size: int, block_size: int, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(world_size, PEER, monkeypatch, block_size)
    given = inputs.make("float32", COUNT, world_size)
    factors = inputs.factors(world_size) if op == "premul_sum" else None
    call = Call(Collective.ALL_REDUCE, DType.FLOAT32, COUNT, ReduceOp(op))
    expected = inputs.bits(oracle.reduce(given, "float32", op, factors=factors))
    more = {} if factors is None else {"factors": factors}
    for _ in range(3):
        for output in run(world, call, given, **more):
            assert np.array_equal(output, expected)
    sent = [name for gpu in world.gpus for name, *_ in gpu.calls if name.startswith("nccl")]
    assert bool(sent) == (block_size < world_size), "NCCL carries what crosses blocks, and nothing else"
    assert all(
        (communicator._carrier.nccl is None) == (block_size >= world_size) for communicator in world.communicators
    )
    world.on_each(lambda rank: world.communicators[rank].close())
    assert not world.node.violations
    assert world.node.num_left == 0


def test_reduce_scatter_and_all_gather_of_uneven_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    world_size, counts = 4, (700, 1, 0, 301)
    world = World(world_size, PEER, monkeypatch, world_size)
    total = sum(counts)
    given = [inputs.bits(one).copy() for one in inputs.make("float32", total, world_size)]
    scatter = Call(Collective.REDUCE_SCATTER, DType.FLOAT32, total, ReduceOp.AVG, counts)
    gather = Call(Collective.ALL_GATHER, DType.FLOAT32, total, None, counts)
    shards = [np.zeros(count * 4, np.uint8) for count in counts]
    wholes = [np.zeros(total * 4, np.uint8) for _ in counts]
    expected = inputs.bits(oracle.reduce([one.view(np.float32) for one in given], "float32", "avg"))

    def both(rank: int) -> None:
        requests = [Request(scatter, memory(given[rank]), memory(shards[rank])),
                    Request(gather, memory(shards[rank]), memory(wholes[rank]))]  # fmt: skip
        world.communicators[rank].run_many(requests, STREAMS, capturing=False, timeout_s=60.0, kept=[])

    world.on_each(both)
    assert np.array_equal(np.concatenate(shards), expected)
    assert all(np.array_equal(whole, expected) for whole in wholes)


def test_ranks_that_share_no_host_refuse_together_or_go_by_nccl(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match=r"cuda_transport=peer, but its ranks share no memory: no two of the 2 ranks"):
        World(2, PEER, monkeypatch, block_size=1)
    world = World(2, Options(cuda_transport="auto"), monkeypatch, block_size=1)
    assert all(communicator._carrier.peers is None for communicator in world.communicators)
    run(world, CALL, inputs.make("float32", 1003, 2))
    assert any(name.startswith("nccl") for name, *_ in world.gpus[0].calls)
    world = World(2, Options(), monkeypatch, block_size=2)
    run(world, CALL, inputs.make("float32", 1003, 2))
    assert not any(name.startswith("nccl") for name, *_ in world.gpus[0].calls)
    with caplog.at_level("INFO", logger="detcomm"):
        world = World(2, Options(scratch_bytes=1 << 20), monkeypatch, block_size=2)
    run(world, CALL, inputs.make("float32", 1003, 2))
    assert any(name.startswith("nccl") for name, *_ in world.gpus[0].calls)
    assert (
        "NCCL carries the messages inside a host, too: scratch_bytes is 1048576; expected at least 16777216"
        in caplog.text
    )


def test_a_peer_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel that waits: the call itself may be part of a graph, which nobody watches."""
    world = World(3, PEER, monkeypatch, 4, timeout_s=0.3)
    data = [np.zeros(1003 * 4, np.uint8) for _ in range(3)]

    def call(rank: int) -> None:
        if rank != 1:
            request = Request(CALL, memory(data[rank]), memory(data[rank]))
            world.communicators[rank].run_many([request], STREAMS, capturing=False, timeout_s=60.0, kept=[])

    world.on_each(call)
    for rank in (0, 2):
        with pytest.raises(
            PeerTimeoutError,
            match=f"rank {rank} in collective #1, all_reduce.*: the GPU has waited 0.3 s for rank 1 to make ready",
        ):
            world.on_each(lambda here, rank=rank: world.communicators[rank].poll() if here == rank else None)
    started = time.monotonic()
    world.on_each(call)
    assert time.monotonic() - started < 30.0, "kernels behind a failure wait again"


def test_an_abort_ends_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, PEER, monkeypatch, 2, timeout_s=600.0)
    data = np.zeros(1003 * 4, np.uint8)

    def call(rank: int) -> None:
        if rank == 0:
            request = Request(CALL, memory(data), memory(data))
            world.communicators[0].run_many([request], STREAMS, capturing=False, timeout_s=600.0, kept=[])
        else:
            time.sleep(0.2)
            world.here.gpu = world.gpus[0]
            world.communicators[0].abort()

    world.on_each(call)
    assert world.communicators[0]._carrier.peers.memory.words.host[0] == 1


def test_a_graph_has_its_own_segment_and_its_calls_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, PEER, monkeypatch, 2)
    given = inputs.make("float32", COUNT, 2)
    call = Call(Collective.ALL_REDUCE, DType.FLOAT32, COUNT, ReduceOp.SUM)
    run(world, call, given)
    expected = inputs.bits(oracle.reduce(given, "float32", "sum"))
    used: list[Any] = []
    for capture in (7, 7, 8):
        for gpu in world.gpus:
            gpu.capture = capture
            gpu.calls.clear()
        stream = STREAMS._replace(main=0xF1 + len(used))
        for output in run(world, call, given, capturing=True, streams=stream):
            assert np.array_equal(output, expected)
        path = world.communicators[0]._carrier.peers
        used.append(path.seat(1, capture).scratch)
        waits = [args for name, *args in world.gpus[0].calls if name == "cuStreamWaitEvent" and args[1] == stream.main]
        assert bool(waits) == (len(used) == 2), "behind the call before of the same graph, and of no other"
    assert used[0] == used[1]
    assert len({*used, world.communicators[0]._carrier.peers.seat(1, 0).scratch}) == 3


@pytest.mark.parametrize("mapped", [(True, True, True), (True, False, True), (False, False, True)])
def test_tensors_that_peers_have_mapped_are_read_where_they_lie(
    mapped: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where some ranks have such tensors and others have not, at other offsets each."""
    world_size = 3
    world = World(world_size, PEER, monkeypatch, 4)
    given = inputs.make("float32", COUNT, world_size)
    call = Call(Collective.ALL_REDUCE, DType.FLOAT32, COUNT, ReduceOp.SUM)
    expected = inputs.bits(oracle.reduce(given, "float32", "sum"))
    size = COUNT * 4

    def reduce(rank: int) -> Any:
        access = world.communicators[rank]._carrier.peers.memory._access
        room = access.allocate(1 << 20)
        memory_of = world.communicators[rank]._carrier.peers.memory
        assert memory_of.register([(room, 1 << 20)] if mapped[rank] else [], None, 60.0) == ""
        start = room + 256 * (rank + 1)
        fake_gpu.bytes_at(start, size)[:] = inputs.bits(given[rank])
        tensor = DeviceMemory(start, size)
        world.gpus[rank].calls.clear()
        for _ in range(2):
            fake_gpu.bytes_at(start, size)[:] = inputs.bits(given[rank])
            world.communicators[rank].run_many(
                [Request(call, tensor, tensor)], STREAMS, capturing=False, timeout_s=60.0, kept=[]
            )
        return fake_gpu.bytes_at(start, size).copy(), world.gpus[rank].calls

    launches = []
    for output, calls in world.on_each(reduce):
        assert np.array_equal(output, expected)
        launches.append(sum(name == "cuLaunchKernel" for name, *_ in calls))
    staged = launches[mapped.index(False)] if False in mapped else launches[0] + 4
    in_place = launches[mapped.index(True)]
    assert staged - in_place == 4, "two calls, each staged twice or not at all"


def test_shards_are_even_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(4, PEER, monkeypatch, 4)
    given = [inputs.bits(one).copy() for one in inputs.make("bfloat16", 4 * 331, 4)]
    call = Call(Collective.REDUCE_SCATTER, DType.BFLOAT16, 4 * 331, ReduceOp.SUM, even_shards(4 * 331, 4))

    def in_place(rank: int) -> Any:
        shard = given[rank][rank * 662 : (rank + 1) * 662]
        request = Request(call, memory(given[rank]), memory(shard))
        world.communicators[rank].run_many([request], STREAMS, capturing=False, timeout_s=60.0, kept=[])
        return shard

    expected = inputs.bits(oracle.reduce(inputs.make("bfloat16", 4 * 331, 4), "bfloat16", "sum"))
    assert np.array_equal(np.concatenate(world.on_each(in_place)), expected)


def test_short_calls_are_one_launch_unless_captured_or_the_gpu_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs.make("float32", 1003, 2)
    expected = inputs.bits(oracle.reduce(given, "float32", "sum"))
    options = Options(cuda_transport="peer")
    worlds = []
    for num_left in (132, 4, 3):
        monkeypatch.setattr(residency, "_held", dict.fromkeys(range(2), 132 - num_left))
        worlds.append(world := World(2, options, monkeypatch, 2))
        assert [communicator._carrier.peers.most_blocks for communicator in world.communicators] == [
            {132: 16, 4: 4, 3: 0}[num_left]
        ] * 2
        for capture, launches in ((0, 1 if num_left > 3 else 4), (5, 4), (0, 1 if num_left > 3 else 4)):
            for gpu in world.gpus:
                gpu.capture = capture
                gpu.calls.clear()
            for output in run(world, CALL, given, capturing=bool(capture)):
                assert np.array_equal(output, expected)
            assert all(sum(name == "cuLaunchKernel" for name, *_ in gpu.calls) == launches for gpu in world.gpus)
    world.on_each(lambda rank: worlds[-1].communicators[rank].close())
    assert residency._held == {0: 129, 1: 129}


@pytest.mark.parametrize("transport", ["peer", "auto"])
def test_more_ranks_of_a_host_than_a_signal_pad_has_room_for(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a ragged last block there would be room: all ranks refuse alike."""
    options = Options(cuda_transport=transport)
    if transport == "peer":
        with pytest.raises(UsageError, match="blocks of 32 ranks; expected at most 16"):
            World(17, options, monkeypatch, block_size=32)
        return
    world = World(17, options, monkeypatch, block_size=32)
    assert all(communicator._carrier.peers is None for communicator in world.communicators)


def test_the_reference_path_has_no_peer_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="cuda_path=reference moves bytes by stock NCCL"):
        World(2, Options(cuda_transport="peer", cuda_path="reference"), monkeypatch, block_size=2)
