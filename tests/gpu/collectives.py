# SPDX-License-Identifier: Apache-2.0
"""Ranks on GPUs: reductions have the oracle's bits, whatever the world size, schedule, stream, graph or neighbour."""

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from detcomm.options import Options
from tests.gpu import cases as gpu_cases
from tests.gpu.cases import Case


def start(rank: int, world_size: int) -> str:
    """Join the default group; this rank's device."""
    import detcomm  # noqa: F401  # registers the backend

    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    dist.init_process_group("detcomm")
    assert dist.get_world_size() == world_size
    return f"cuda:{device}"


def all_bits(rank: int, world_size: int, sizes: tuple[int, ...], path: str) -> str:
    """Every case of one path in groups of several sizes."""
    every = [(size, case) for size in sizes for case in gpu_cases.cases(size, size == max(sizes))]
    wanted = [(size, case) for size, case in every if case.options.cuda_path == path]
    return compare_all(start(rank, world_size), rank, world_size, wanted)


def compare_all(device: str, rank: int, world_size: int, wanted: list[tuple[int, Case]]) -> str:
    """Cases in groups of several sizes, each with the oracle."""
    sizes = list(dict.fromkeys(size for size, _ in wanted))
    started = time.monotonic()
    num_kernels = gpu_cases.compile_together(wanted, rank, world_size)
    dist.barrier()
    compiled_s = time.monotonic() - started
    num_compared = 0
    for size in sizes:
        by_options: dict[Options, Any] = {}
        for case in (case for wanted_size, case in wanted if wanted_size == size):
            if case.options not in by_options:
                by_options[case.options] = dist.new_group(range(size), pg_options=case.options, backend="detcomm")
            if rank < size:
                _compare(case, rank, size, by_options[case.options], device)
                num_compared += 1
        for group in by_options.values():
            if rank < size:
                dist.destroy_process_group(group)
    dist.destroy_process_group()
    return f"{num_compared} calls compared, {num_kernels} kernels compiled in {compiled_s:.1f} s"


def _compare(case: Case, rank: int, size: int, group: Any, device: str) -> None:
    tensor = gpu_cases.contribution(case, rank, size, device)
    before = gpu_cases.host_bytes(tensor)
    op = gpu_cases.torch_op(case, rank, size)
    right = gpu_cases.expected(case, size)
    if case.collective == "all_reduce":
        dist.all_reduce(tensor, op, group=group)
        got = gpu_cases.host_bytes(tensor)
    elif case.collective == "reduce":
        dist.reduce(tensor, group_dst=0, op=op, group=group)
        got = gpu_cases.host_bytes(tensor)
        right = right if rank == 0 else before
    else:
        output = torch.empty(case.count // size, dtype=tensor.dtype, device=device)
        dist.reduce_scatter_tensor(output, tensor, op, group=group)
        got = gpu_cases.host_bytes(output)
        right = right[rank * len(got) : (rank + 1) * len(got)]
    wrong = np.flatnonzero(got != right)
    assert not len(wrong), f"{case} of {size} ranks, rank {rank}: {len(wrong)} bytes differ, first at {wrong[0]}"


def streams_and_graphs(rank: int, world_size: int) -> str:
    """Asynchronous, coalesced, beside busy streams, in graphs, on CPU tensors: always the same bits."""
    device = start(rank, world_size)
    case = Case("all_reduce", "bfloat16", "sum", 300_007, Options())
    source = gpu_cases.contribution(case, rank, world_size, device)
    right = gpu_cases.expected(case, world_size)

    def check(tensor: torch.Tensor, what: str) -> None:
        assert np.array_equal(gpu_cases.host_bytes(tensor), right), f"rank {rank}: {what} gives other bits"

    on_cpu = source.cpu()
    dist.all_reduce(on_cpu)
    check(on_cpu, "the CPU")
    other = torch.cuda.Stream()
    busy = torch.randn(1024, 1024, device=device)
    for turn in range(50):
        tensor = source.clone()
        with torch.cuda.stream(other):
            for _ in range(3):
                busy = torch.tanh(busy @ busy)
        if turn % 2:
            dist.all_reduce(tensor)
        else:
            work = dist.all_reduce(tensor, async_op=True)
            del tensor
            work.wait()
            tensor = work.result()[0]
        check(tensor, f"turn {turn}")
    halves = [source.clone() for _ in range(3)]
    with dist._coalescing_manager(device=torch.device(device), async_ops=True) as block:
        for tensor in halves:
            dist.all_reduce(tensor)
    block.wait()
    for tensor in halves:
        check(tensor, "a coalesced call")
    future = dist.all_reduce(tensor := source.clone(), async_op=True).get_future()
    check(future.wait()[0], "a future")
    _shards(rank, world_size, device)
    _movement(rank, world_size, device)
    _graph(source, check)
    dist.destroy_process_group()
    return "50 turns, coalesced, future, graph, movement: one set of bits"


def _shards(rank: int, world_size: int, device: str) -> None:
    """Apart, in place, and at the beginning of the whole, which is in place on rank 0 alone."""
    for start in (None, 5 * rank, 0):
        for _ in range(3):  # the short way, too
            gathered = torch.full((world_size * 5,), -1.0, device=device)
            shard = torch.empty(5, device=device) if start is None else gathered[start : start + 5]
            shard.fill_(float(rank))
            dist.all_gather_into_tensor(gathered, shard)
            expected = [float(peer) for peer in range(world_size) for _ in range(5)]
            assert gathered.tolist() == expected, f"rank {rank}: a shard at {start} gathers {gathered.tolist()}"
            given = torch.arange(world_size * 5, dtype=torch.float32, device=device)
            shard = torch.empty(5, device=device) if start is None else given[start : start + 5]
            dist.reduce_scatter_tensor(shard, given)
            expected = [float(world_size * (5 * rank + k)) for k in range(5)]
            assert shard.tolist() == expected, f"rank {rank}: a shard at {start} gets {shard.tolist()}"


def _movement(rank: int, world_size: int, device: str) -> None:
    """What stock NCCL does for the group."""
    tensor = torch.full((3,), float(rank), device=device)
    dist.broadcast(tensor, 1)
    assert tensor.tolist() == [1.0] * 3
    received = torch.empty(world_size, device=device)
    dist.all_to_all_single(received, torch.full((world_size,), float(rank), device=device))
    assert received.tolist() == [float(peer) for peer in range(world_size)]
    sent, taken = torch.full((4,), float(rank), device=device), torch.empty(4, device=device)
    ops = [
        dist.P2POp(dist.isend, sent, (rank + 1) % world_size),
        dist.P2POp(dist.irecv, taken, (rank - 1) % world_size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert taken.tolist() == [float((rank - 1) % world_size)] * 4
    dist.barrier()


def _graph(source: torch.Tensor, check: Any) -> None:
    tensor = source.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_reduce(tensor)  # connects and compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(tensor)
        second = source.clone()
        dist.all_reduce(second, async_op=True).wait()
    for _ in range(5):
        tensor.copy_(source)
        graph.replay()
        eager = source.clone()
        dist.all_reduce(eager)
        check(tensor, "a graph")
        check(second, "an asynchronous call in a graph")
        check(eager, "a call beside a graph")
    torch.cuda.synchronize()
    del graph
