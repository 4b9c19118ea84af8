# SPDX-License-Identifier: Apache-2.0
"""The gradients, weights and optimizer state of a model that is spread over ranks, and one hash of them.

Ranks that hold replicas must have equal bits; the hash covers one of each, keyed by where it lies in the model:
pipeline, tensor and expert-parallel rank. So it does not depend on the data-parallel size or on who plays which rank.
Knows how Megatron's buffers are cut into buckets and buckets into shards, and undoes both.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

Chunks = list[Any]
"""A rank's parts of the model, in Megatron's wrapper of data parallelism."""


def parameters(chunks: Chunks) -> Iterator[tuple[str, Tensor]]:
    """This rank's parameters. A name is the same on ranks that hold replicas, and on no others."""
    pp, tp = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    etp, ep = parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_model_parallel_rank()
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            is_expert = not getattr(parameter, "allreduce", True)  # Megatron's own mark
            place = f"pipeline {pp}, expert {ep}, tensor {etp}" if is_expert else f"pipeline {pp}, tensor {tp}"
            yield f"{place}: {index}.{name}", parameter


def gradients(chunks: Chunks, sharded: bool) -> Iterator[tuple[str, Tensor]]:
    """The reduced gradients, before clipping; on every rank, after the backward pass.

    Args:
        sharded: the distributed optimizer is used, so that each data-parallel rank has one shard of each bucket. They
            are gathered here: equal gradients are seen to be equal for every bucket size.
    """
    whole: dict[Tensor, Tensor] = {}
    for bucket, places, group in _buckets(chunks):
        data = _gather(bucket.grad_data, group) if sharded else bucket.grad_data
        for parameter in bucket.params_list:
            begin, end, _ = places[parameter]
            whole[parameter] = data[begin - bucket.offset : end - bucket.offset]
    for name, parameter in parameters(chunks):
        yield name, whole[parameter]


def weights(chunks: Chunks, sharded: bool) -> Iterator[tuple[str, Tensor]]:
    """The weights as the next forward pass will see them; on every rank.

    Args:
        sharded: the distributed optimizer is used: its gathers of the new weights, which overlap puts off to the next
            forward pass, are done first.
    """
    if sharded:
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)
    for name, parameter in parameters(chunks):
        yield name, parameter.detach()


def optimizer_state(chunks: Chunks, optimizer: Any) -> Iterator[tuple[str, Tensor, int]]:
    """This rank's optimizer state: name, a run of the flattened whole, and where the run begins."""
    parts = [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if part.optimizer is not None]
    for name, parameter in parameters(chunks):
        for part in parts:
            index = getattr(part, "model_param_group_index_map", {}).get(parameter)
            if index is not None:  # the distributed optimizer
                owned, begin = part.optimizer.param_groups[index[0]]["params"][index[1]], _begin(part, parameter)
            else:
                owned, begin = getattr(parameter, "main_param", parameter), 0
            for key, value in part.optimizer.state.get(owned, {}).items():
                if key != "step":
                    yield f"{name} {key}", value, begin


def hash_of(tensors: Iterator[tuple[str, Tensor]]) -> str:
    """One hash of what all ranks hold; on every rank.

    Raises:
        RuntimeError: replicas differ, naming the tensor and the ranks.
    """
    own = {}
    for name, tensor in tensors:
        bits = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        own[name] = hashlib.sha256(f"{tensor.dtype} {tensor.numel()}\n".encode() + bits.tobytes()).hexdigest()
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    ranks: dict[str, dict[str, list[int]]] = {}
    for rank, hashes in enumerate(everyone):
        for name, value in hashes.items():
            ranks.setdefault(name, {}).setdefault(value, []).append(rank)
    for name, values in sorted(ranks.items()):
        if len(values) > 1:
            raise RuntimeError(f"{name}: replicas have other bits on ranks {' / '.join(map(str, values.values()))}")
    text = "\n".join(f"{name} {min(values)}" for name, values in sorted(ranks.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _buckets(chunks: Chunks) -> Iterator[tuple[Any, Any, dist.ProcessGroup]]:
    """Each bucket, where parameters lie in its buffer, and the group over which it is reduced."""
    dense_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    expert_group = parallel_state.get_expert_data_parallel_group()
    for chunk in chunks:
        for buffers, group in ((chunk.buffers, dense_group), (chunk.expert_parallel_buffers, expert_group)):
            for buffer in buffers:
                for bucket in buffer.buckets:
                    yield bucket, buffer.param_index_map, group


def _gather(bucket: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A whole reduced bucket, from the shard that each rank of the group has in its own copy of it."""
    shard = bucket.view(group.size(), -1)[group.rank()].clone()
    whole = torch.empty_like(bucket)
    dist.all_gather_into_tensor(whole, shard, group=group)
    return whole


def _begin(part: Any, parameter: Tensor) -> int:
    return int(part._get_model_param_range_map(parameter)["param"].start)
