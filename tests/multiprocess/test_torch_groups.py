# SPDX-License-Identifier: Apache-2.0
"""What torch asks of a group beside collectives: names, devices, subgroups, splitting, composite backends."""

import importlib
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import detcomm
from tests import inputs, oracle
from tests.launch import Ranks
from tests.torch_tensors import bits, form_under_test, group, tensor


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as standing:
        yield standing


def _facts(rank: int, world_size: int) -> dict[str, object]:
    with group() as pg:
        pg.set_timeout(timedelta(seconds=77))
        before = pg._get_sequence_number_for_group()
        dist.all_reduce(torch.ones(1))
        pg.monitored_barrier(timedelta(seconds=60))
        return {
            "rank": pg.rank() == dist.get_rank() == rank,
            "size": pg.size() == dist.get_world_size() == world_size,
            "backend": dist.get_backend(),
            "name": bool(pg.group_name),
            "desc": pg.group_desc,
            "pg name": pg.name(),
            "devices": "cpu" in [device.type for device in pg._device_types],
            "device backend": pg._get_backend(torch.device("cpu")).name(),
            "counted": pg._get_sequence_number_for_group() - before,
        }


def test_facts_of_a_group(ranks: Ranks) -> None:
    for facts in ranks.run(_facts):
        assert facts == {
            "rank": True,
            "size": True,
            "backend": "detcomm",
            "name": True,
            "desc": "default_pg",
            "pg name": "detcomm" if form_under_test() == "process_group" else "custom",
            "devices": True,
            "device backend": "detcomm",
            "counted": 1,
        }


def _subgroups(rank: int, world_size: int) -> list[bool]:
    outcome = []
    given = inputs.make("float32", 200, world_size, 2)
    with group():
        members = [0, 1, 3]
        ring = detcomm.Options(association="ring", ring_chunk_elems=3)
        subgroup = dist.new_group(members, pg_options=ring, group_desc="of three")
        value = tensor(given[rank], "float32")
        if rank in members:
            dist.all_reduce(value, group=subgroup)
            outcome.append(subgroup.group_desc == "of three")
            part = [given[member] for member in members]
            expected = oracle.reduce(part, "float32", "sum", association="ring", ring_chunk_elems=3)
            outcome.append(bits(value) == inputs.bits(expected).tobytes())
            dist.broadcast(value, 3, group=subgroup)
        dist.barrier()
        if rank in members:
            dist.destroy_process_group(subgroup)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        value = torch.full((3,), float(rank))
        dist.all_reduce(value, group=mesh["inner"].get_group())
        outcome.append(value.tolist() == [float(4 * (rank // 2) + 1)] * 3)
    return outcome


def test_subgroups(ranks: Ranks) -> None:
    assert all(map(all, ranks.run(_subgroups)))


def _split(rank: int, world_size: int) -> list[bool]:
    given = inputs.make("float32", 200, world_size, 2)
    with group() as pg:
        split = pg.split_group([3, 1], group_name="two", group_desc="split")
        if rank not in (1, 3):
            return [split is None]
        value = tensor(given[rank], "float32")
        split.allreduce([value]).wait()
        expected = oracle.reduce([given[3], given[1]], "float32", "sum")
        split.shutdown()
        return [
            bits(value) == inputs.bits(expected).tobytes(),
            (split.group_name, split.group_desc, split.rank()) == ("two", "split", [3, 1].index(rank)),
        ]


@pytest.mark.skipif(form_under_test() == "backend", reason="splitting is the other form's alone")
def test_split_group(ranks: Ranks) -> None:
    assert all(map(all, ranks.run(_split)))


def _with_a_device(rank: int, world_size: int) -> list[bool]:
    """What torch does where ``init_process_group`` got a device_id, as it can with a GPU alone: it splits groups."""
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda: torch.device("cuda")
    given = inputs.make("float32", 200, world_size, 2)
    try:
        with group() as pg:
            pg.bound_device_id = torch.device("cuda:0")
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
            outcome = []
            for name, members in (("inner", [rank // 2 * 2, rank // 2 * 2 + 1]), ("outer", [rank % 2, rank % 2 + 2])):
                value = tensor(given[rank], "float32")
                dist.all_reduce(value, group=mesh[name].get_group())
                expected = oracle.reduce([given[member] for member in members], "float32", "sum")
                outcome.append(bits(value) == inputs.bits(expected).tobytes())
            pair = dist.split_group(split_ranks=[[0, 3]])
            outcome.append(isinstance(pair, dist.ProcessGroup) == (rank in (0, 3)))
            three = dist.new_group([0, 1, 3])
            if rank != 2:
                dist.barrier(group=three)
            return outcome
    finally:
        importlib.reload(torch.accelerator)


@pytest.mark.skipif(form_under_test() == "backend", reason="splitting is the other form's alone")
def test_a_mesh_of_groups_that_know_their_device(ranks: Ranks) -> None:
    assert all(map(all, ranks.run(_with_a_device)))


def _composite(rank: int, world_size: int, backend: str) -> dict[str, object]:
    with group(backend=backend) as pg:
        value = torch.full((3,), float(rank))
        dist.all_reduce(value)
        scattered = torch.empty(1)
        dist.reduce_scatter_tensor(scattered, torch.full((world_size,), float(rank)))
        coalesced = torch.empty(1)
        with dist._coalescing_manager(async_ops=True) as works:
            dist.reduce_scatter_tensor(coalesced, torch.full((world_size,), float(rank)))
        works.wait()
        gathered = [None] * world_size
        dist.all_gather_object(gathered, rank)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        work.wait()
        subgroup = dist.new_group([0, 1])
        if rank < 2:
            dist.barrier(group=subgroup)
        dist.barrier()
        return {
            "sum": value.tolist() == [6.0] * 3 and scattered.tolist() == coalesced.tolist() == [6.0],
            "objects": gathered == list(range(world_size)),
            "stock": isinstance(pg._get_backend(torch.device("cpu")), dist.ProcessGroupGloo),
            "device": pg._get_backend(torch.device("cuda")).name(),
        }


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:detcomm", "cuda:detcomm,cpu:gloo"])
def test_a_composite_backend_leaves_cpu_tensors_to_stock_gloo(ranks: Ranks, backend: str) -> None:
    expected = {"sum": True, "objects": True, "stock": True, "device": "detcomm"}
    assert ranks.run(_composite, backend) == [expected] * ranks.world_size


def _cuda_alone(rank: int, world_size: int) -> str:
    with group(backend="cuda:detcomm"):
        try:
            dist.all_reduce(torch.ones(3))
        except RuntimeError as error:
            return str(error)
    return "no error"


def test_a_group_for_cuda_alone_takes_no_cpu_tensors(ranks: Ranks) -> None:
    assert all("no backend for CPU tensors" in text or "No backend type" in text for text in ranks.run(_cuda_alone))


def _again_and_again(rank: int, world_size: int) -> bool:
    for _ in range(5):
        with group():
            dist.all_reduce(torch.ones(2))
    return True


def test_groups_made_and_destroyed_again_and_again(ranks: Ranks) -> None:
    assert all(ranks.run(_again_and_again))


def _alone(rank: int, world_size: int) -> list[bool]:
    with group():
        solo = [dist.new_group([member]) for member in range(world_size)][rank]
        given = tensor(inputs.make("float32", 40, 1, 0)[0], "float32")
        value = given.clone()
        dist.all_reduce(value, dist.ReduceOp.AVG, group=solo)
        kept = bits(value) == bits(given)
        works = [dist.all_reduce(value, group=solo, async_op=True)]
        output, pieces = torch.empty(40), [torch.empty(40)]
        dist.reduce_scatter_tensor(output, value, group=solo)
        dist.all_gather(pieces, value, group=solo)
        dist.broadcast(value, rank, group=solo)
        dist.barrier(group=solo)
        works[0].wait()
        doubled = torch.ones(3)
        dist.all_reduce(doubled, dist._make_nccl_premul_sum(2.0), group=solo)
        return [kept, bits(output) == bits(given), bits(pieces[0]) == bits(given), doubled.tolist() == [2.0] * 3]


def test_groups_of_one_rank(ranks: Ranks) -> None:
    assert all(map(all, ranks.run(_alone)))


def _form(rank: int, world_size: int) -> str:
    try:
        with group():
            value = torch.ones(3)
            dist.all_reduce(value)
            return str(value.tolist())
    except detcomm.DetcommError as error:
        return f"{type(error).__name__} {error}"


def test_the_form_of_the_backend(ranks: Ranks) -> None:
    offered = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
    for text in ranks.run(_form, env={"DETCOMM_FORM": "backend"}):
        assert text == "[4.0, 4.0, 4.0]" if offered else "needs torch >= 2.14" in text
    assert ranks.run(_form, env={"DETCOMM_FORM": "process_group"}) == ["[4.0, 4.0, 4.0]"] * ranks.world_size
    odd: list[dict[str, str]] = [{}, {"DETCOMM_FORM": "odd"}, {}, {}]
    for rank, text in enumerate(ranks.run(_form, env=odd)):
        assert text.startswith("UsageError" if rank == 1 else "MismatchError")
        assert "DETCOMM_FORM: expected one of" in text
