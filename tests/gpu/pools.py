# SPDX-License-Identifier: Apache-2.0
"""Tensors in memory that the peers read where it lies: the same bits, on some ranks or on all, and nothing staged."""

import contextlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import detcomm
from detcomm.errors import UsageError
from detcomm.options import Options
from tests.gpu import cases as gpu_cases
from tests.gpu.cases import Case
from tests.gpu.collectives import start
from tests.gpu.speed import in_turn
from tests.gpu.training import digest, network

NUM_STEPS = 4


def reduced(rank: int, world_size: int) -> list[str]:
    """The oracle's bits whichever ranks' tensors are in a pool; and what staging costs."""
    device = start(rank, world_size)
    lines = [_mixed(rank, world_size, device)]
    group = dist.distributed_c10d._get_default_group()
    with detcomm.symmetric_memory() as pool:
        inside = torch.ones(64 << 20, dtype=torch.uint8, device=device).view(torch.bfloat16)
    outside = torch.ones_like(inside)
    tensors = {"staged": outside, "in place": inside}
    ms, host_us = in_turn(lambda tensor: dist.all_reduce(tensor, group=group), tensors, 9)
    copied = {name: _num_copied(tensor) >> 20 for name, tensor in tensors.items()}
    lines.append(
        f"all_reduce of 64 MiB: staged {ms['staged']:.3f} ms, {copied['staged']} MiB copied; in place "
        f"{ms['in place']:.3f} ms, {copied['in place']} MiB copied; host {host_us['staged']:.0f} and "
        f"{host_us['in place']:.0f} us"
    )
    _backend(device).deregister_mem_pool(pool)
    assert _memory().regions.find(inside.data_ptr(), 1) is None
    dist.all_reduce(inside)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    return lines


def _mixed(rank: int, world_size: int, device: str) -> str:
    """Regions are each rank's own: none, some, or all ranks' tensors may lie in one, at unlike places."""
    num_compared = 0
    for in_pool in (0b0, 0b1, 0b0101_0101, 0b1010_1010, 0b1111_1111):
        pool: Any = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            room = torch.empty((8 << 20) + 512 * rank, dtype=torch.uint8, device=device)
        _backend(device).register_mem_pool(pool)
        for dtype, count in (("float32", 1009), ("bfloat16", 700_001), ("float32", 1 << 20)):
            case = Case("all_reduce", dtype, "sum", count, Options())
            source = gpu_cases.contribution(case, rank, world_size, device)
            tensor = source.clone()
            if in_pool >> rank & 1:
                tensor = room[256 * rank : 256 * rank + source.nbytes].view(source.dtype)
                tensor.copy_(source)
            dist.all_reduce(tensor)
            assert np.array_equal(gpu_cases.host_bytes(tensor), gpu_cases.expected(case, world_size)), case
            num_compared += 1
        _backend(device).deregister_mem_pool(pool)
    return f"{num_compared} calls equal the oracle, with tensors of no, some and all ranks in a pool"


def expandable(rank: int, world_size: int) -> str:
    """With expandable segments, which torch's pools have then: another kind is taken, or all ranks refuse alike."""
    device = start(rank, world_size)
    plain: Any = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(plain):
        torch.empty(40 << 20, dtype=torch.uint8, device=device)
    reason = ""
    try:
        _backend(device).register_mem_pool(plain)
    except UsageError as error:
        reason = str(error)
    told: list[Any] = [None] * world_size
    dist.all_gather_object(told, reason)
    assert len(set(told)) == 1, told
    with detcomm.symmetric_memory():
        tensor = torch.ones(1 << 20, device=device)
    assert _memory().regions.find(tensor.data_ptr(), tensor.nbytes) is not None
    dist.all_reduce(tensor)
    assert bool((tensor == world_size).all())
    dist.barrier()
    dist.destroy_process_group()
    return f"expandable segments: a plain pool {reason or 'was registered'}; that of symmetric_memory was"


def trained(rank: int, world_size: int) -> str:
    """DDP with and without its buckets in a registered pool; by ``cuda_transport=peer``, as the environment says."""
    device = start(rank, world_size)
    digests = [_train(rank, device, pooled) for pooled in (False, True)]
    dist.barrier()
    dist.destroy_process_group()
    assert digests[0] == digests[1], f"weights differ: {digests}"
    return f"DDP with its buckets in a registered pool: weights {digests[0]}, as without; all gradients found there"


def _train(rank: int, device: str, pooled: bool) -> str:
    def pool() -> Any:
        return detcomm.symmetric_memory() if pooled else contextlib.nullcontext()

    with pool():
        model = DistributedDataParallel(network(device), bucket_cap_mb=0.05, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 + rank)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        model(torch.randn(32, 64, device=device)).square().mean().backward()
        optimizer.step()
        if step == 0:  # torch makes the buckets anew after the first step, in the order in which gradients came
            with pool():
                assert model.reducer._rebuild_buckets()
    if pooled:
        regions = _memory().regions
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert gradients
        outside = [grad.shape for grad in gradients if regions.find(grad.data_ptr(), grad.nbytes) is None]
        assert not outside, f"{len(outside)} of {len(gradients)} gradients are not in the pool"
    return digest(list(model.parameters()))


def _backend(device: str) -> Any:
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device(device))


def _num_copied(tensor: torch.Tensor) -> int:
    """Bytes that the copies of one more call read and write."""
    group: Any = dist.distributed_c10d._get_default_group()
    calls = group._group.cuda._made._communicator._carrier.calls
    programs = []
    find = calls.variant
    calls.variant = lambda *args: programs.append(find(*args)) or programs[-1]
    dist.all_reduce(tensor)
    calls.variant = find
    return int(programs[-1].counts.copied_bytes)


def _memory() -> Any:
    group: Any = dist.distributed_c10d._get_default_group()
    device = torch.device("cuda", torch.cuda.current_device())
    return group._group.cuda._peer_memory(device)
