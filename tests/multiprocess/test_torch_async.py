# SPDX-License-Identifier: Apache-2.0
"""Asynchronous calls, futures, coalescing, several threads: order is kept, and so are the bits."""

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import detcomm
from tests import inputs, oracle
from tests.launch import Ranks
from tests.torch_tensors import bits, form_under_test, group, tensor

COUNT = 300


@pytest.fixture(scope="module", params=[3, 5])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as standing:
        yield standing


def _given(world_size: int, seed: int, count: int = COUNT) -> tuple[list[oracle.Array], bytes]:
    given = inputs.make("float32", count, world_size, seed)
    return given, inputs.bits(oracle.reduce(given, "float32", "sum")).tobytes()


def _in_order(rank: int, world_size: int) -> list[bool]:
    with group():
        values, expected, works = [], [], []
        for seed in range(20):
            given, sums = _given(world_size, seed, 50 + 100 * (seed % 3))
            value = tensor(given[rank], "float32")
            if seed % 4 == 3:
                dist.all_reduce(value)  # behind those that are queued
            else:
                works.append(dist.all_reduce(value, async_op=True))
            values.append(value)
            expected.append(sums)
        for work in works:
            work.wait()
        outcome = [bits(value) == sums for value, sums in zip(values, expected, strict=True)]
        if form_under_test() == "process_group":  # the other form's works tell no more than wait() and get_future()
            outcome += [work.is_completed() and work.is_success() for work in works]
        return outcome


def test_synchronous_and_asynchronous_calls_keep_their_order(ranks: Ranks) -> None:
    assert all(map(all, ranks.run(_in_order)))


def _dependent(rank: int, world_size: int) -> bool:
    """Two calls on one tensor without a wait in between: the second sees the first one's result."""
    with group():
        value = torch.ones(1000)
        first = dist.all_reduce(value, async_op=True)
        parts = [torch.empty(1000) for _ in range(world_size)]
        second = dist.all_gather(parts, value, async_op=True)
        second.wait()
        first.wait()
        return all(bool((part == world_size).all()) for part in parts)


def test_calls_on_one_tensor_follow_each_other(ranks: Ranks) -> None:
    assert all(ranks.run(_dependent))


def _futures(rank: int, world_size: int) -> list[bool]:
    outcome = []
    with group():
        given, sums = _given(world_size, 1)
        value = tensor(given[rank], "float32")
        work = dist.all_reduce(value, async_op=True)
        future = work.get_future()
        outcome.append(future.then(lambda done: bits(done.value()[0])).wait() == sums)
        if form_under_test() == "process_group":
            outcome.append(work.get_future() is future)
            outcome.append(work.result()[0] is value)

        # A callback that calls a collective itself runs it right behind its own call.
        value = tensor(given[rank], "float32")
        other = torch.ones(3)

        def chained(done: torch.futures.Future[list[torch.Tensor]]) -> float:
            dist.all_reduce(other)
            return float(other[0])

        chain = dist.all_reduce(value, async_op=True).get_future().then(chained)
        behind = dist.all_reduce(torch.ones(7), async_op=True)
        outcome.append(chain.wait() == world_size)
        behind.wait()
    return outcome


def test_futures(ranks: Ranks) -> None:
    assert all(map(all, ranks.run(_futures)))


def _coalesced(rank: int, world_size: int, with_device: bool, async_ops: bool) -> list[bool]:
    outcome = []
    device = torch.device("cpu") if with_device else None
    with group():
        pg = dist.group.WORLD
        cases = [_given(world_size, seed, world_size * (seed + 1) * 10) for seed in range(4)]
        values = [tensor(given[rank], "float32") for given, _ in cases]
        with dist._coalescing_manager(pg, device, async_ops=async_ops) as manager:
            for value in values:
                dist.all_reduce(value)
        if async_ops:
            manager.wait()
        outcome += [bits(value) == sums for value, (_, sums) in zip(values, cases, strict=True)]

        outputs = [torch.empty(len(sums) // 4 // world_size) for _, sums in cases]
        with dist._coalescing_manager(pg, device, async_ops=async_ops) as manager:
            for output, (given, _) in zip(outputs, cases, strict=True):
                dist.reduce_scatter_tensor(output, tensor(given[rank], "float32"))
        if async_ops:
            manager.wait()
        for output, (_, sums) in zip(outputs, cases, strict=True):
            size = len(sums) // world_size
            outcome.append(bits(output) == sums[rank * size : rank * size + size])

        gathered = [torch.empty(world_size * output.numel()) for output in outputs]
        with dist._coalescing_manager(pg, device, async_ops=async_ops) as manager:
            for whole, output in zip(gathered, outputs, strict=True):
                dist.all_gather_into_tensor(whole, output)
        if async_ops:
            manager.wait()
        outcome += [bits(whole) == sums for whole, (_, sums) in zip(gathered, cases, strict=True)]
    return outcome


@pytest.mark.parametrize("with_device", [False, True])
@pytest.mark.parametrize("async_ops", [False, True])
def test_coalesced_calls_are_reduced_each_by_itself(ranks: Ranks, with_device: bool, async_ops: bool) -> None:
    assert all(map(all, ranks.run(_coalesced, with_device, async_ops)))


def _open_block(rank: int, world_size: int) -> list[bool]:
    outcome = []
    with group() as pg:
        cpu = torch.device("cpu")
        given, sums = _given(world_size, 4)
        value, untouched = tensor(given[rank], "float32"), tensor(given[rank], "float32")
        pg._start_coalescing(cpu)
        work = pg.allreduce([value])
        pieces = torch.zeros(world_size)
        pg.allgather([list(pieces.split(1))], [torch.full((1,), float(rank))])
        received = torch.zeros(2)
        dist.isend(torch.full((2,), float(rank)), (rank + 1) % world_size)
        dist.irecv(received, (rank - 1) % world_size)
        outcome.append(bits(value) == bits(untouched))
        try:
            work.wait()
            outcome.append(False)
        except detcomm.UsageError:
            outcome.append(True)
        whole = pg._end_coalescing(cpu)
        whole.wait()
        work.wait()
        outcome.append(bits(value) == sums)
        outcome.append(pieces.tolist() == list(range(world_size)))
        outcome.append(received.tolist() == [float((rank - 1) % world_size)] * 2)
        pg._start_coalescing(cpu)
        lost = pg.allreduce([untouched])
        pg._start_coalescing(cpu)  # the first block was left by an exception
        kept = pg.allreduce([torch.ones(2)])
        pg._end_coalescing(cpu).wait()
        kept.wait()
        try:
            lost.wait()
            outcome.append(False)
        except detcomm.UsageError as error:
            outcome.append("nothing was sent" in str(error))
    return outcome


def test_an_open_block_holds_reductions_back_until_its_end(ranks: Ranks) -> None:
    assert all(map(all, ranks.run(_open_block)))


def _threads(rank: int, world_size: int) -> bool:
    """Groups of their own, each driven by a thread of its own, at the same time."""
    with group():
        groups = [dist.new_group() for _ in range(3)]
        outcome = [False] * len(groups)

        def drive(index: int) -> None:
            good = True
            for seed in range(10):
                given, sums = _given(world_size, 100 * index + seed)
                value = tensor(given[rank], "float32")
                dist.all_reduce(value, group=groups[index])
                good = good and bits(value) == sums
            outcome[index] = good

        threads = [threading.Thread(target=drive, args=(index,)) for index in range(len(groups))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return all(outcome)


def test_groups_in_several_threads(ranks: Ranks) -> None:
    assert all(ranks.run(_threads))


def _destroyed_in_flight(rank: int, world_size: int) -> bool:
    with group():
        works = [dist.all_reduce(torch.ones(1 << 16), async_op=True) for _ in range(10)]
        futures = [work.get_future() for work in works]
    return all(future.done() for future in futures)


def test_destruction_with_work_in_flight_finishes_it(ranks: Ranks) -> None:
    assert all(ranks.run(_destroyed_in_flight))


def _impatient(rank: int, world_size: int) -> str:
    dist.init_process_group("detcomm", timeout=timedelta(seconds=100))
    try:
        if rank == 0:
            time.sleep(3)
            return "came late"
        work = dist.all_reduce(torch.ones(4), async_op=True)
        try:
            work.wait(timedelta(seconds=0.2))
        except detcomm.PeerTimeoutError as error:
            return str(error)
        return "no error"
    finally:
        dist.destroy_process_group()


def test_a_wait_of_its_own_patience_makes_the_group_unusable(ranks: Ranks) -> None:
    first, *others = ranks.run(_impatient)
    assert first == "came late"
    assert any("not done within the 0.2 s" in text for text in others)
    assert all("0.2 s" in text for text in others)
