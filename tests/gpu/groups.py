# SPDX-License-Identifier: Apache-2.0
"""Groups in other ways: with an agreement on each call, beside stock gloo for CPU tensors, on threads, twenty."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from detcomm.errors import MismatchError
from detcomm.options import Options
from tests.gpu import cases as gpu_cases
from tests.gpu.cases import Case
from tests.gpu.collectives import start

CASE = Case("all_reduce", "bfloat16", "sum", 300_007, Options())
NUM_GROUPS = 20
NUM_THREADS = 4


def agreement(rank: int, world_size: int) -> str:
    """With ``cuda_agreement=on`` a call that differs raises on every rank, and the group goes on."""
    device = start(rank, world_size)
    group: Any = dist.new_group(backend="detcomm", pg_options=Options(cuda_agreement="on"))
    text = ""
    for dtype in (torch.float32, torch.int32 if rank == 1 else torch.float32):
        try:
            dist.all_reduce(torch.ones(8, dtype=dtype, device=device), group=group)
        except MismatchError as error:
            text = str(error)
    assert "int32[8]" in text, f"rank {rank} was told {text!r}"
    tensor = gpu_cases.contribution(CASE, rank, world_size, device)
    dist.all_reduce(tensor, group=group)
    assert np.array_equal(gpu_cases.host_bytes(tensor), gpu_cases.expected(CASE, world_size))
    dist.destroy_process_group()
    return text


def beside_gloo(rank: int, world_size: int) -> str:
    """``cpu:gloo,cuda:detcomm``, as Megatron makes its groups."""
    import detcomm  # noqa: F401  # registers the backend

    torch.cuda.set_device(rank % torch.cuda.device_count())
    device = f"cuda:{torch.cuda.current_device()}"
    dist.init_process_group("cpu:gloo,cuda:detcomm")
    right = gpu_cases.expected(CASE, world_size)
    groups: list[Any] = [None, dist.new_group(), dist.new_group(backend="cpu:gloo,cuda:detcomm")]
    for group in groups:
        tensor = gpu_cases.contribution(CASE, rank, world_size, device)
        dist.all_reduce(tensor, group=group)
        assert np.array_equal(gpu_cases.host_bytes(tensor), right)
        on_cpu = torch.full((3,), float(rank))
        dist.all_reduce(on_cpu, group=group)
        assert on_cpu.tolist() == [world_size * (world_size - 1) / 2] * 3
        objects: list[Any] = [None] * world_size
        dist.all_gather_object(objects, rank, group=group)
        assert objects == list(range(world_size))
    dist.destroy_process_group()
    return f"{len(groups)} groups: the oracle's bits on the GPU, gloo on the CPU"


def twenty(rank: int, world_size: int, backend: str) -> str:
    """Set-up time, device memory and sockets of many groups, each used once by each collective."""
    import detcomm  # noqa: F401  # registers the backend

    torch.cuda.set_device(rank % torch.cuda.device_count())
    device = f"cuda:{torch.cuda.current_device()}"
    dist.init_process_group(backend)
    tensor = torch.ones(1 << 21, dtype=torch.bfloat16, device=device)
    shard = torch.empty(tensor.numel() // world_size, dtype=torch.bfloat16, device=device)
    before: list[Any] = [torch.cuda.mem_get_info()[0]]
    sockets = [_num_sockets()]
    took_s = []
    for _ in range(NUM_GROUPS):
        dist.barrier()
        started = time.perf_counter()
        group = dist.new_group(backend=backend)
        dist.all_reduce(tensor, group=group)
        dist.reduce_scatter_tensor(shard, tensor, group=group)
        dist.all_gather_into_tensor(tensor, shard, group=group)
        dist.all_reduce(tensor[:8], group=group)
        torch.cuda.synchronize()
        took_s.append(time.perf_counter() - started)
        dist.barrier()
        before.append(torch.cuda.mem_get_info()[0])
        sockets.append(_num_sockets())
        dist.barrier()
    dist.destroy_process_group()
    mib = [(earlier - later) / 2**20 / world_size for earlier, later in pairwise(before)]
    return (
        f"{backend}, {NUM_GROUPS} groups: first {took_s[0]:.2f} s, {mib[0]:.0f} MiB and {sockets[1] - sockets[0]} "
        f"sockets a rank; each further {sorted(took_s[1:])[len(took_s) // 2]:.3f} s, "
        f"{sum(mib[1:]) / (NUM_GROUPS - 1):.0f} MiB and {(sockets[-1] - sockets[1]) / (NUM_GROUPS - 1):.0f} sockets"
    )


def threads(rank: int, world_size: int) -> str:
    """Groups used from threads of their own, for the first time and later, in any order; ended with work in flight."""
    device = start(rank, world_size)
    groups = [dist.new_group(backend="detcomm") for _ in range(NUM_THREADS)]
    source = gpu_cases.contribution(CASE, rank, world_size, device)
    right = gpu_cases.expected(CASE, world_size)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        # Another order on each rank: a first call connects, and waits for its peers.
        turns = [(number + rank) % NUM_THREADS for number in range(NUM_THREADS)]
        jobs = [pool.submit(_thirty_turns, groups[number], source, device) for number in turns]
        results = [job.result() for job in jobs]
    for tensor in (tensor for tensors in results for tensor in tensors):
        assert np.array_equal(gpu_cases.host_bytes(tensor), right)
    for group in groups:
        for _ in range(5):
            dist.all_reduce(source.clone(), group=group, async_op=True)
        dist.destroy_process_group(group)
    dist.destroy_process_group()
    return f"{NUM_THREADS} groups, each on a thread and a stream of its own: the oracle's bits; ended in flight"


def _thirty_turns(group: Any, source: torch.Tensor, device: str) -> list[torch.Tensor]:
    torch.cuda.set_device(device)
    stream: Any = torch.cuda.Stream()
    tensors = []
    with torch.cuda.stream(stream):
        for turn in range(30):
            tensors.append(source.clone())
            work = dist.all_reduce(tensors[-1], group=group, async_op=bool(turn % 3))
            if work is not None:
                work.wait()
    stream.synchronize()
    return tensors


def _num_sockets() -> int:
    """Open in this process: NCCL's between hosts, and those of stores and of gloo."""
    num_sockets = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            num_sockets += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except FileNotFoundError:  # closed meanwhile
            continue
    return num_sockets
