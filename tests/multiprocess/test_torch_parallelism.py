# SPDX-License-Identifier: Apache-2.0
"""Parallelism of torch that shards, nests or pipelines runs on detcomm unchanged, and keeps its bits.

Each test trains twice with a setting that the promise leaves free: buckets, wrapping, a sharded optimizer, the
schedule of a pipeline. What stock backends change with it is equal here. ``test_torch_training`` has plain DDP.
"""

import hashlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import detcomm
from tests.launch import Ranks
from tests.torch_tensors import bits, group

STEPS = 3
RING = detcomm.Options(association="ring", ring_chunk_elems=4)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as standing:
        yield standing


def _model() -> nn.Sequential:
    torch.manual_seed(1)
    widths = [16, 33, 24, 40, 4]
    layers: list[nn.Module] = []
    for width, next_width in pairwise(widths):
        layers += [nn.Linear(width, next_width), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank)) * 3.0 ** (rank - 1)


def _digest(values: Iterator[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(bits(value.full_tensor() if isinstance(value, DTensor) else value))
    return digest.hexdigest()


def _train(model: Any, optimizer: Any, rank: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        model(_batch(rank, step)).square().sum().backward()
        optimizer.step()


def _one(results: list[str]) -> str:
    """Replicas agree."""
    assert len(set(results)) == 1
    return results[0]


def _ddp(rank: int, world_size: int, bucket_mb: float, how: str, options: detcomm.Options | None) -> str:
    with group(options):
        model = _model()
        ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
        if how == "zero":
            optimizer: Any = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
        else:
            optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
        if how == "accumulate":
            for step in range(STEPS):
                with ddp.no_sync():
                    ddp(_batch(rank, 2 * step)).square().sum().backward()
                ddp(_batch(rank, 2 * step + 1)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        elif how == "join":
            with Join([ddp]):
                for step in range(STEPS + rank):
                    optimizer.zero_grad()
                    ddp(_batch(rank, step)).square().sum().backward()
                    optimizer.step()
            # Ranks that ended early have not stepped since: the last one to end has the weights.
            for value in model.parameters():
                dist.broadcast(value.detach(), world_size - 1)
        else:
            _train(ddp, optimizer, rank)
        return _digest(model.parameters())


@pytest.mark.parametrize("how", ["accumulate", "join"])
def test_ddp_keeps_the_bits_of_every_bucket_size(ranks: Ranks, how: str) -> None:
    whole, small = (_one(ranks.run(_ddp, cap, how, None)) for cap in (25, 0.001))
    assert whole == small
    assert _one(ranks.run(_ddp, 25, how, RING)) != whole  # the negative control


def test_a_sharded_optimizer_has_the_bits_of_a_whole_one(ranks: Ranks) -> None:
    plain = _one(ranks.run(_ddp, 25, "plain", None))
    assert _one(ranks.run(_ddp, 0.001, "zero", None)) == plain
    assert _one(ranks.run(_ddp, 0.001, "zero", RING)) != plain  # the negative control


def _fsdp(
    rank: int, world_size: int, shape: tuple[int, ...], by_layer: bool, half: bool, options: detcomm.Options | None
) -> str:
    with group(options):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16) if half else None
        arguments: dict[str, Any] = {"mesh": mesh} if policy is None else {"mesh": mesh, "mp_policy": policy}
        model = _model()
        if by_layer:
            for layer in model:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, **arguments)
        fully_shard(model, **arguments)
        _train(model, torch.optim.Adam(model.parameters(), lr=0.01), rank)
        return _digest(model.parameters())


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["flat", "hybrid"])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_fsdp2_keeps_the_bits_of_every_wrapping(ranks: Ranks, shape: tuple[int, ...], half: bool) -> None:
    whole, wrapped = (_one(ranks.run(_fsdp, shape, by_layer, half, None)) for by_layer in (False, True))
    assert whole == wrapped


def test_fsdp2_feels_the_order_of_additions(ranks: Ranks) -> None:
    """The negative control of the wrappings."""
    assert _one(ranks.run(_fsdp, (4,), True, False, RING)) != _one(ranks.run(_fsdp, (4,), True, False, None))


def test_hybrid_sharding_has_the_bits_of_flat_sharding(ranks: Ranks) -> None:
    """Two by two: nested sums of aligned blocks of 2^k ranks are the flat tree's, and dividing by 2 twice is exact."""
    flat, hybrid = (_one(ranks.run(_fsdp, shape, True, False, None)) for shape in ((4,), (2, 2)))
    assert flat == hybrid


def _tensor_parallel(rank: int, world_size: int, options: detcomm.Options | None) -> str:
    with group(options):
        mesh = init_device_mesh("cpu", (world_size,))
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        _train(model, torch.optim.SGD(model.parameters(), lr=0.01), 0)
        return _digest(model.parameters())


def test_tensor_parallelism_keeps_the_bits_of_every_schedule(ranks: Ranks) -> None:
    tree = _one(ranks.run(_tensor_parallel, None))
    assert tree == _one(ranks.run(_tensor_parallel, detcomm.Options(schedule="oneshot", transport="gloo")))
    assert tree != _one(ranks.run(_tensor_parallel, RING))  # the negative control


def _pipeline(rank: int, world_size: int, kind: str) -> str:
    """The gradients of this rank's stage; ``alone``: of the same layers without a pipeline."""
    num_parts, batch, target = 8, _batch(0, 0), torch.zeros(8, 4)
    model = _model()

    def loss(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (output - wanted).square().sum()

    with group():
        if kind == "alone":
            for part, wanted in zip(batch.chunk(num_parts), target.chunk(num_parts), strict=True):
                value: Any = loss(model(part), wanted)
                value.backward()
        layers = nn.Sequential(*list(model)[2 * rank : 2 * rank + 2])
        if kind != "alone":
            stage = PipelineStage(layers, rank, world_size, torch.device("cpu"))
            schedule_class = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[kind]
            schedule = schedule_class(stage, num_parts, loss_fn=loss, scale_grads=False)
            if rank == 0:
                schedule.step(batch)
            elif rank == world_size - 1:
                schedule.step(target=target, losses=[])
            else:
                schedule.step()
        return _digest(value.grad for value in layers.parameters() if value.grad is not None)


def test_a_pipeline_has_the_gradients_of_its_layers_alone(ranks: Ranks) -> None:
    alone = ranks.run(_pipeline, "alone")
    assert len(set(alone)) == ranks.world_size
    assert ranks.run(_pipeline, "GPipe") == alone
    assert ranks.run(_pipeline, "1F1B") == alone
