# SPDX-License-Identifier: Apache-2.0
"""Golden runs over several ranks: replicas, FSDP2 and DTensor shards and hand-given shards give the whole's digests."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from detcomm.errors import DetcommError
from detcomm.golden import Recorder, digest
from detcomm.golden.file import GoldenRun, read
from tests.launch import Ranks
from tests.torch_tensors import group


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as standing:
        yield standing


class Model(nn.Module):
    """Rows that three ranks cannot share evenly, and a parameter that two of three ranks get nothing of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(batch))) * self.scale


def _train(rank: int, world_size: int, path: str, how: str, backend: str = "detcomm") -> dict[str, str]:
    """Two steps; the digests of the whole weights as this rank sees them in the end."""
    with group(backend=backend):
        model = Model()
        trained: Any = model
        if how == "ddp":
            trained = DistributedDataParallel(model)
        elif how == "fsdp":
            fully_shard(model.first)
            trained = fully_shard(model)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01)
        with Recorder(path, config={"how": how}) as run:
            for step in range(2):
                optimizer.zero_grad()
                batch = torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + rank))
                loss = trained(batch).square().sum()
                loss.backward()
                optimizer.step()
                run.step(step, loss=loss, model=trained, optimizer=optimizer)
        return {
            name: str(digest(value.full_tensor() if isinstance(value, DTensor) else value))
            for name, value in model.named_parameters()
        }


def _weights(run: GoldenRun, step: int) -> dict[str, str]:
    return {name: each.digest for (kind, name), each in run.steps[step].tensors.items() if kind == "weights"}


@pytest.mark.parametrize("backend", ["detcomm", "gloo"])
def test_replicas_and_shards_give_the_digests_of_the_whole(ranks: Ranks, tmp_path: Path, backend: str) -> None:
    files = {}
    for how in ("ddp", "fsdp"):
        path = tmp_path / f"{how}.golden"
        wholes = ranks.run(_train, str(path), how, backend)
        files[how] = run = read(path)
        assert run.complete
        assert wholes == [_weights(run, 1)] * 3
        assert _weights(run, 0) != _weights(run, 1)
        assert run.environment["world_size"] == 3
        expected = "detcomm tree/1:float32" if backend == "detcomm" else "gloo"
        assert run.environment["numerics"] == [expected]
    ddp, fsdp = files["ddp"].steps[0], files["fsdp"].steps[0]
    assert ddp.tensors.keys() == fsdp.tensors.keys(), "wrappers do not change names"
    assert {kind for kind, _ in ddp.tensors} == {"gradients", "optimizer", "weights"}
    assert ddp.loss == fsdp.loss is not None
    assert ddp.loss["ranks"] == 3


def _shards(rank: int, world_size: int, path: str) -> dict[str, str]:
    """Placements over a mesh of two dimensions, and parts given by hand; the digests that the file must hold."""
    with group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        generator = torch.Generator().manual_seed(0)
        expected = {}
        with Recorder(path) as run:
            for name, placements in PLACEMENTS.items():
                whole = torch.randn(7, 6, generator=generator)
                expected[name] = str(digest(whole))
                run.add("weights", name, distribute_tensor(whole, mesh, placements))
            layer = nn.Linear(6, 10, bias=False)
            nn.init.normal_(layer.weight, generator=generator)
            expected["strided"] = str(digest(layer.weight))
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(0)]))
            run.add("weights", "strided", fully_shard(layer, mesh=mesh["dp"]).weight)
            whole = torch.randn(8, 6, generator=generator).to(torch.bfloat16)
            expected["given"] = expected["columns"] = str(digest(whole))
            flat = whole.reshape(-1)
            run.add("weights", "given", flat[12 * rank : 12 * rank + 12], offset=12 * rank, shape=(8, 6))
            indices = np.arange(48).reshape(8, 6)[2 * rank : 2 * rank + 2]
            run.add("weights", "columns", whole[2 * rank : 2 * rank + 2], indices=indices, shape=(8, 6))
            run.add("weights", "own", whole[:1] * rank, replicas="none")
            run.step(0)
        return expected | {f"own@{each}": str(digest(whole[:1] * each)) for each in range(world_size)}


PLACEMENTS = {
    "rows": [Replicate(), Shard(0)],
    "columns of rows": [Shard(0), Shard(1)],
    "twice": [Shard(1), Shard(1)],
    "replicated": [Replicate(), Replicate()],
}


def test_every_placement_gives_the_digest_of_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.golden"
    with Ranks(4) as four:
        expected = four.run(_shards, str(path))
    assert expected == [_weights(read(path), 0)] * 4


def _record_wrongly(rank: int, world_size: int, path: str, what: str) -> None:
    with Recorder(path) as run:
        values = torch.arange(6.0)
        run.step(0, model={"good": values})
        if what == "replica" and rank == 1:
            values[0] = -0.0
        if what == "believed":
            run.add("weights", "w", values * rank, replicas="first")
            run.step(1)
            raise DetcommError("no replica was looked at")
        size = 5 if what == "missing" else 6
        run.add("weights", "w", values[:size], offset=6 * rank, shape=(6 * world_size,))
        if what == "partial":
            mesh = init_device_mesh("cpu", (world_size,))
            run.add("weights", "sum", DTensor.from_local(values, mesh, [Partial()]))
        good = values.double() if what == "type" and rank == 0 else values
        run.step(2 if what == "step" and rank == 2 else 1, model={"good": good})


def _wrong(rank: int, world_size: int, path: str, what: str) -> str:
    with group():
        with pytest.raises(DetcommError) as caught:
            _record_wrongly(rank, world_size, path, what)
        return str(caught.value)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (
            "replica",
            "step 1: replicas of weights of good .* differ: [0-9a-f]{32} on ranks 0, 2; [0-9a-f]{32} on rank 1",
        ),
        ("believed", "no replica was looked at"),
        ("missing", r"weights of w has shape \(18,\), 18 elements; the ranks hold 15: 5 at 0, 5 at 6, 5 at 12"),
        ("partial", "weights of sum: .* pending sum"),
        ("type", r"weights of good: rank 0 has float64 of shape \(6,\), rank 1 float32"),
        ("step", "steps 1 to 2"),
    ],
)
def test_what_does_not_fit_is_an_error_on_all_ranks(ranks: Ranks, tmp_path: Path, what: str, expected: str) -> None:
    path = tmp_path / "run.golden"
    for text in ranks.run(_wrong, str(path), what):
        assert re.search(expected, text), text
    assert not path.exists()
    assert 0 in read(path.with_name("run.golden.partial")).steps, "what came before stays usable"


def _cannot_write(rank: int, world_size: int) -> str:
    with group(), Recorder("/nowhere/run.golden") as run:
        with pytest.raises(DetcommError) as caught:
            run.step(0, loss=1.0)
        return str(caught.value)


def test_a_file_that_rank_0_cannot_write_is_an_error_on_all_ranks(ranks: Ranks) -> None:
    texts = ranks.run(_cannot_write)
    assert len(set(texts)) == 1
    assert "rank 0: golden run: cannot write /nowhere/run.golden" in texts[0]
