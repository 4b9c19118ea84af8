# SPDX-License-Identifier: Apache-2.0
"""Training on GPUs: weights do not depend on buckets or wrapping; and what stock NCCL does instead, as a control."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests import inputs
from tests.gpu.collectives import start

BUCKETS_MB = (0.02, 0.1, 25.0)


def ddp(rank: int, world_size: int) -> str:
    """The same hash for all bucket sizes."""
    device = start(rank, world_size)
    hashes = [_train(rank, device, bucket) for bucket in BUCKETS_MB]
    dist.destroy_process_group()
    assert len(set(hashes)) == 1, f"weights differ with the bucket size: {dict(zip(BUCKETS_MB, hashes, strict=True))}"
    return f"buckets of {BUCKETS_MB} MB: weights {hashes[0]}"


def fsdp(rank: int, world_size: int) -> str:
    """The same hash whether each layer is a message of its own or the whole model is one."""
    device = start(rank, world_size)
    hashes = [_train_sharded(rank, device, each) for each in (True, False)]
    dist.destroy_process_group()
    assert len(set(hashes)) == 1, f"weights differ with the wrapping: {hashes}"
    return f"each layer, whole model: weights {hashes[0]}"


def stock(rank: int, world_size: int) -> str:
    """The control: whether stock NCCL's bits change with bucket and message size on the same inputs."""
    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    hashes = [_train(rank, f"cuda:{device}", bucket) for bucket in BUCKETS_MB]
    whole = torch.from_numpy(inputs.rank_input("float32", 1 << 20, rank, world_size)).to(f"cuda:{device}")
    whole = torch.nan_to_num(whole, nan=1.0).clamp(-1e30, 1e30)
    part = whole[: 1 << 14].clone()
    dist.all_reduce(whole)
    dist.all_reduce(part)
    num_different = int((whole[: 1 << 14].view(torch.int32) != part.view(torch.int32)).sum())
    dist.destroy_process_group()
    return (
        f"stock NCCL: {len(set(hashes))} different weights of {len(hashes)} bucket sizes; "
        f"{num_different} of {1 << 14} elements differ in a shorter message"
    )


def network(device: str) -> torch.nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(64, 64) for _ in range(6)]
    return torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.GELU())]).to(device)


def digest(tensors: list[torch.Tensor]) -> str:
    """Of their bytes."""
    content = b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(content).hexdigest()[:16]


def _train_sharded(rank: int, device: str, each_layer: bool) -> str:
    from torch.distributed.fsdp import fully_shard  # its import takes many seconds on a cold machine

    model = network(device)
    for layer in model if each_layer else ():
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    for batch in torch.randn(4, 16, 64, device=device):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    shards: list[Any] = list(model.parameters())
    return digest([shard.full_tensor() for shard in shards])


def _train(rank: int, device: str, bucket_mb: float) -> str:
    model = network(device)
    replica = DistributedDataParallel(model, device_ids=[torch.device(device).index], bucket_cap_mb=bucket_mb)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    batches = torch.randn(4, 16, 64, device=device)
    for batch in batches:
        optimizer.zero_grad()
        replica(batch).square().mean().backward()
        optimizer.step()
    return digest(list(model.parameters()))
