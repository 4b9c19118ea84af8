# SPDX-License-Identifier: Apache-2.0
"""What large programs do with groups all the time: many subgroups, options meant for other backends, long queues."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests import inputs, oracle
from tests.launch import Ranks
from tests.torch_tensors import bits, group, tensor


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as standing:
        yield standing


def _sums_to_the_oracle(pg: Any, rank: int, members: list[int], seed: int) -> bool:
    given = inputs.make("float32", 300, len(members), seed)
    value = tensor(given[members.index(rank)], "float32")
    dist.all_reduce(value, group=pg)
    return bits(value) == inputs.bits(oracle.reduce(given, "float32", "sum")).tobytes()


def _many_subgroups(rank: int, world_size: int) -> dict[str, bool]:
    """As Megatron's start: groups by size and by list, with options of other backends, some for a rank alone."""
    seen: dict[str, bool] = {}
    with group() as pg:
        own, every = dist.new_subgroups(2)
        seen["by size"] = len(every) == 2 and _sums_to_the_oracle(own, rank, [rank // 2 * 2, rank // 2 * 2 + 1], 1)
        own, _ = dist.new_subgroups_by_enumeration([[0, 3], [2, 1]])
        seen["by list"] = _sums_to_the_oracle(own, rank, [0, 3] if rank in (0, 3) else [1, 2], 2)
        reverse = dist.new_group([3, 2, 1, 0])  # torch sorts ranks
        seen["sorted"] = _sums_to_the_oracle(reverse, rank, [0, 1, 2, 3], 3)
        stock = dist.new_group(pg_options=dist.ProcessGroupGloo._Options(), timeout=timedelta(seconds=77))
        seen["options of gloo"] = _sums_to_the_oracle(stock, rank, [0, 1, 2, 3], 4)
        beside = dist.new_group(backend="gloo")
        seen["gloo beside"] = isinstance(beside._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        seen["mesh"] = _sums_to_the_oracle(mesh["data"].get_group(), rank, [rank % 2, rank % 2 + 2], 6)
        seen["flattened"] = _sums_to_the_oracle(mesh._flatten("all").get_group(), rank, [0, 1, 2, 3], 7)
        dist.barrier(device_ids=[0])
        pg.set_timeout(timedelta(seconds=99))
        dist.destroy_process_group(reverse)
        seen["after"] = _sums_to_the_oracle(pg, rank, [0, 1, 2, 3], 8)
        # Last: torch 2.14.1 counts this group on its own ranks alone, and the next one of all, stock gloo's too, finds
        # no common name.
        local = dist.new_group([0, 2], use_local_synchronization=True) if rank in (0, 2) else None
        seen["of those who call"] = local is None or _sums_to_the_oracle(local, rank, [0, 2], 5)
    return seen


def test_subgroups_of_every_kind(ranks: Ranks) -> None:
    for seen in ranks.run(_many_subgroups):
        assert all(seen.values()), seen


def _queues(rank: int, world_size: int) -> list[bool]:
    """Messages of one group, pair and tag arrive in the order in which they were sent; those of groups do not mix."""
    num_messages = 60
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    with group():
        groups = [dist.group.WORLD, dist.new_group()]
        sent, received, works = [], [], []
        for index in range(num_messages):
            for number, pg in enumerate(groups):
                sent.append(torch.full((1 + index % 7 * 100,), 1000.0 * rank + 10 * index + number))
                works.append(dist.isend(sent[-1], right, group=pg))
            if index % 10 == 0:
                works.append(dist.all_reduce(torch.ones(50), async_op=True))
        for number in (1, 0):  # the second group's first
            for index in range(num_messages):
                value = torch.empty(1 + index % 7 * 100)
                works.append(dist.irecv(value, left, group=groups[number]))
                received.append((value, 1000.0 * left + 10 * index + number))
        for work in reversed(works):
            work.wait()
        return [bool((value == expected).all()) for value, expected in received]


def test_messages_arrive_in_their_order(ranks: Ranks) -> None:
    assert all(map(all, ranks.run(_queues)))


def _sharded(by_layer: bool) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 5))
    if by_layer:
        fully_shard(model[0])
    return fully_shard(model)


def _resharded(rank: int, world_size: int, folder: str) -> list[bool]:
    """What one wrapping saves, another one loads, bit by bit; both ways of saving."""
    with group():
        saved = _sharded(by_layer=True)
        state = get_model_state_dict(saved)
        dcp.save(state, checkpoint_id=f"{folder}/sync")
        dcp.async_save(state, checkpoint_id=f"{folder}/async").result()
        outcome = []
        for name in ("sync", "async"):
            model = _sharded(by_layer=False)
            with torch.no_grad():
                for value in model.parameters():
                    value.zero_()
            loaded = get_model_state_dict(model)
            dcp.load(loaded, checkpoint_id=f"{folder}/{name}")
            set_model_state_dict(model, loaded)
            for value, expected in zip(model.parameters(), saved.parameters(), strict=True):
                outcome.append(bits(value.full_tensor()) == bits(expected.full_tensor()))
        return outcome


def test_a_sharded_checkpoint_is_read_by_another_sharding(ranks: Ranks, tmp_path: Any) -> None:
    assert ranks.run(_resharded, str(tmp_path)) == [[True] * 8] * ranks.world_size


def _abort_all(rank: int, world_size: int) -> str:
    dist.init_process_group("detcomm")
    kept = dist.new_group()
    dist.all_reduce(torch.ones(3), group=kept)
    dist.distributed_c10d._abort_process_group()
    try:
        kept.allreduce([torch.ones(3)]).wait()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_an_abort_of_all_groups(ranks: Ranks) -> None:
    assert all("abort" in text or "destroyed" in text for text in ranks.run(_abort_all))
