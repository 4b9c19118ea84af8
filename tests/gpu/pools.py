# SPDX-License-Identifier: Apache-2.0
"""Gradients in memory that the peers read where it lies: the same weights, and nothing of them staged."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import detcomm
from tests.gpu.collectives import start
from tests.gpu.training import digest, network

NUM_STEPS = 4


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


def _memory() -> Any:
    group: Any = dist.distributed_c10d._get_default_group()
    device = torch.device("cuda", torch.cuda.current_device())
    return group._group.cuda._peer_memory(device)
