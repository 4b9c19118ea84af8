# SPDX-License-Identifier: Apache-2.0
"""DDP, FSDP2, DTensor, functional collectives and torch.compile run on detcomm unchanged, and keep its bits."""

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import detcomm
from tests import inputs, oracle
from tests.launch import Ranks
from tests.torch_tensors import bits, group, tensor

STEPS = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as standing:
        yield standing


class Model(nn.Module):
    """Several layers, so that small buckets are many; a branch that some steps leave out; buffers to broadcast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh())
        self.branch = nn.Linear(32, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, batch: torch.Tensor, with_branch: bool = True) -> torch.Tensor:
        hidden = self.layers(batch)
        return self.head(hidden + self.branch(hidden) if with_branch else hidden)


def _digest(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for value in module.parameters():
        digest.update(bits(value.full_tensor() if isinstance(value, DTensor) else value))
    return digest.hexdigest()


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank)) * 3.0 ** (rank - 1)


def _train(model: Any, rank: int, steps: int = STEPS, with_branch: bool | None = True) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        use = step % 2 == 0 if with_branch is None else with_branch
        model(_batch(rank, step), use).square().sum().backward()
        optimizer.step()


def _ddp(rank: int, world_size: int, options: detcomm.Options | None, arguments: dict[str, Any], how: str) -> str:
    with group(options):
        model = Model()
        ddp = DistributedDataParallel(model, **arguments)
        if how == "built in":
            ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        elif how == "compiled":
            ddp = torch.compile(ddp, backend="eager")
        _train(ddp, rank, with_branch=None if how == "unused" else True)
        return _digest(model)


def _one_digest(results: list[str]) -> str:
    """Replicas agree."""
    assert len(set(results)) == 1
    return results[0]


def test_ddp_has_the_same_bits_for_every_bucket_size(ranks: Ranks) -> None:
    whole = _one_digest(ranks.run(_ddp, None, {"bucket_cap_mb": 25}, "plain"))
    small = _one_digest(ranks.run(_ddp, None, {"bucket_cap_mb": 0.001}, "plain"))
    views = _one_digest(ranks.run(_ddp, None, {"bucket_cap_mb": 0.004, "gradient_as_bucket_view": True}, "plain"))
    fixed = _one_digest(ranks.run(_ddp, None, {"bucket_cap_mb": 0.001, "static_graph": True}, "plain"))
    assert whole == small == views == fixed
    # The negative control: another order of additions, other weights.
    linear = detcomm.Options(association="ring", ring_chunk_elems=4)
    assert _one_digest(ranks.run(_ddp, linear, {"bucket_cap_mb": 25}, "plain")) != whole


@pytest.mark.parametrize("how", ["built in", "compiled"])
def test_ddp_built_in_hook_and_compilation_keep_the_bits_of_every_bucket_size(ranks: Ranks, how: str) -> None:
    digests = {_one_digest(ranks.run(_ddp, None, {"bucket_cap_mb": cap}, how)) for cap in (25, 0.001)}
    assert len(digests) == 1


def test_ddp_with_unused_parameters(ranks: Ranks) -> None:
    arguments = [{"bucket_cap_mb": cap, "find_unused_parameters": True} for cap in (25, 0.001)]
    assert len({_one_digest(ranks.run(_ddp, None, given, "unused")) for given in arguments}) == 1


def _accumulate(rank: int, world_size: int) -> str:
    with group():
        model = Model()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for step in range(2):
            with ddp.no_sync():
                ddp(_batch(rank, 2 * step)).square().sum().backward()
            ddp(_batch(rank, 2 * step + 1)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return _digest(model)


def test_ddp_no_sync(ranks: Ranks) -> None:
    _one_digest(ranks.run(_accumulate))


def _joined(rank: int, world_size: int) -> int:
    """Ranks have unequal numbers of batches."""
    with group():
        ddp = DistributedDataParallel(Model())
        num_steps = 0
        with Join([ddp]):
            for step in range(2 + rank):
                ddp(_batch(rank, step)).square().sum().backward()
                num_steps += 1
        return num_steps


def test_ddp_join(ranks: Ranks) -> None:
    assert ranks.run(_joined) == [2, 3, 4]


def _failing_reduction(rank: int, world_size: int) -> str:
    """An error in an asynchronous reduction reaches the user of DDP as an exception."""
    with group() as pg:
        ddp = DistributedDataParallel(Model(), bucket_cap_mb=0.001)
        ddp(_batch(rank, 0)).square().sum().backward()
        dist.barrier()
        if rank == 1:
            pg.abort()
        try:
            for step in range(3):
                ddp(_batch(rank, step)).square().sum().backward()
        except RuntimeError as error:
            return str(error)
    return "no error"


def test_ddp_reports_a_lost_group(ranks: Ranks) -> None:
    texts = ranks.run(_failing_reduction)
    assert all("abort" in text or "destroyed" in text for text in texts), texts


def _fsdp2(rank: int, world_size: int, options: detcomm.Options | None) -> str:
    with group(options):
        mesh = init_device_mesh("cpu", (world_size,))
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 4))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(_batch(rank, step)).square().sum().backward()
            optimizer.step()
        return _digest(model)


def test_fsdp2(ranks: Ranks) -> None:
    tree = _one_digest(ranks.run(_fsdp2, None))
    assert tree == _one_digest(ranks.run(_fsdp2, detcomm.Options(schedule="oneshot", transport="gloo")))
    assert tree != _one_digest(ranks.run(_fsdp2, detcomm.Options(association="ring", ring_chunk_elems=4)))


def _dtensor(rank: int, world_size: int) -> list[bool]:
    given = inputs.make("float32", 60, world_size, 3)
    sums = inputs.bits(oracle.reduce(given, "float32", "sum")).tobytes()
    with group():
        mesh = init_device_mesh("cpu", (world_size,))
        local = tensor(given[rank], "float32").reshape(12, 5)
        partial = DTensor.from_local(local, mesh, [Partial()])
        whole = partial.redistribute(mesh, [Replicate()]).to_local()
        shards = partial.redistribute(mesh, [Shard(0)])
        table = torch.arange(70.0).reshape(7, 10)
        sharded = distribute_tensor(table, mesh, [Shard(0)])
        across = sharded.redistribute(mesh, [Shard(1)])
        return [
            bits(whole) == sums,
            bits(shards.full_tensor()) == sums,
            torch.equal(sharded.full_tensor(), table),
            torch.equal(across.full_tensor(), table),
        ]


def test_dtensor(ranks: Ranks) -> None:
    assert all(map(all, ranks.run(_dtensor)))


def _functional(rank: int, world_size: int, compiled: bool) -> list[bool]:
    given = inputs.make("float32", 12 * world_size, world_size, 3)
    sums = inputs.bits(oracle.reduce(given, "float32", "sum")).tobytes()
    with group() as pg:

        def collectives(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
            reduced = funcol.all_reduce(value, "sum", pg)
            shard = funcol.reduce_scatter_tensor(value, "sum", 0, pg)
            gathered = funcol.all_gather_tensor(shard, 0, pg)
            first, second = funcol.all_reduce_coalesced([value, value * 1], "sum", pg)
            moved = funcol.all_to_all_single(value, None, None, pg)
            sent = funcol.broadcast(value, 1, pg)
            return tuple(wait(one) for one in (reduced, gathered, first, second, moved, sent))

        def wait(value: torch.Tensor) -> torch.Tensor:
            return funcol.wait_tensor(value)

        run = torch.compile(collectives, backend="aot_eager") if compiled else collectives
        value = tensor(given[rank], "float32")
        reduced, gathered, first, second, moved, sent = run(value)
        expected = torch.cat([tensor(given[peer], "float32").chunk(world_size)[rank] for peer in range(world_size)])
        return [
            bits(reduced) == sums,
            bits(gathered) == sums,
            bits(first) == sums,
            bits(second) == sums,
            bits(moved) == bits(expected),
            bits(sent) == inputs.bits(given[1]).tobytes(),
            bits(value) == inputs.bits(given[rank]).tobytes(),
        ]


@pytest.mark.parametrize("compiled", [False, True])
def test_functional_collectives(ranks: Ranks, compiled: bool) -> None:
    assert all(map(all, ranks.run(_functional, compiled)))


def _compiled_in_place(rank: int, world_size: int) -> bool:
    given = inputs.make("float32", 40, world_size, 3)
    with group():

        def step(value: torch.Tensor) -> torch.Tensor:
            doubled = value + value
            dist.all_reduce(doubled)
            return doubled * 1

        result = torch.compile(step, backend="aot_eager")(tensor(given[rank], "float32"))
        doubled = [part + part for part in given]
        return bits(result) == inputs.bits(oracle.reduce(doubled, "float32", "sum")).tobytes()


def test_a_collective_in_compiled_code(ranks: Ranks) -> None:
    assert all(ranks.run(_compiled_in_place))


def _checkpoint(rank: int, world_size: int, folder: str) -> bool:
    import torch.distributed.checkpoint as dcp

    with group():
        state = {"model": Model().state_dict()}
        dcp.save(state, checkpoint_id=f"{folder}/sync")
        dcp.async_save(state, checkpoint_id=f"{folder}/async").result()
        outcome = True
        for name in ("sync", "async"):
            loaded = {"model": {key: torch.zeros_like(value) for key, value in state["model"].items()}}
            dcp.load(loaded, checkpoint_id=f"{folder}/{name}")
            outcome = outcome and all(torch.equal(loaded["model"][key], value) for key, value in state["model"].items())
        return outcome


def test_distributed_checkpoint(ranks: Ranks, tmp_path: Any) -> None:
    assert all(ranks.run(_checkpoint, str(tmp_path)))


def test_the_digest_sees_one_bit() -> None:
    model = Model()
    before = _digest(model)
    with torch.no_grad():
        model.head.bias[0] = torch.nextafter(model.head.bias[0], torch.tensor(9.0))
    assert _digest(model) != before
