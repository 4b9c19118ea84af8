# SPDX-License-Identifier: Apache-2.0
"""``detcomm.megatron`` on real ranks, around a stand-in for the function through which Megatron makes its groups."""

import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

import detcomm
from tests import launch

MODULE = "megatron.core.parallel_state"
POLICY = "pp=stock; cp=fixed(association=ring, ring_chunk_elems=1); MODEL_PARALLEL_GROUP=stock"
CONTRIBUTIONS = (2.0**24, 1.0, -(2.0**24))
"""Rank 0 to 2: summed in this order they give 0, in any other 1."""


class SettingsForNccl:
    """In the place of ``ProcessGroupNCCL.Options``, which a CPU build of torch has not."""

    is_high_priority_stream = True


def _stand_in(**members: Any) -> ModuleType:
    module = ModuleType(MODULE)
    vars(module).update(members)
    sys.modules[MODULE] = module
    return module


def _create_group(**arguments: Any) -> Any:
    return dist.new_group(**arguments)


def _sum(group: Any, rank: int) -> list[float]:
    tensor = torch.full((3,), CONTRIBUTIONS[rank])
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()


def _route(rank: int, world_size: int) -> dict[str, Any]:
    from detcomm import megatron

    parallel_state = _stand_in(create_group=_create_group)
    job = megatron.initialize(policy=POLICY, exact_grad_norm=True)
    everybody = list(range(world_size))
    data = parallel_state.create_group(everybody, pg_options=SettingsForNccl(), group_desc="DATA_PARALLEL_GROUP")
    context = parallel_state.create_group(everybody, group_desc="CONTEXT_PARALLEL_GROUP")
    parallel_state.create_group(everybody, group_desc="PIPELINE_MODEL_PARALLEL_GROUP")
    parallel_state.create_group(everybody, backend="gloo", group_desc="DATA_PARALLEL_GROUP_GLOO")
    for one in everybody:
        parallel_state.create_group([one], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    parallel_state.create_group(everybody[:2], group_desc="EMBEDDING_GROUP")
    dist.new_group(everybody, backend="gloo", group_desc="of the script")
    sums = {"tree": _sum(data, rank), "ring": _sum(context, rank)}
    gradients = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-20, 5, 1000)
    norms = {
        megatron.exact_grad_norm([gradients.tensor_split(cuts)[rank]], [data]).hex()
        for cuts in ([10, 11], [400, 900], [0, 1000])
    }
    found = {
        "sums": sums,
        "norms": norms | {megatron.exact_grad_norm([gradients], []).hex()},
        "here": megatron.report(),
        "everywhere": megatron.report(all_ranks=True),
        "state": megatron.checkpoint_state(),
        "backend": dist.get_backend(),
        "numerics_id": job.numerics_id,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    try:
        megatron.initialize()
    except detcomm.UsageError as error:
        found["again"] = str(error)
    job.close()
    found["put back"] = parallel_state.create_group is _create_group
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_every_group_has_the_backend_and_the_order_of_its_rule() -> None:
    results = launch.run(3, _route)
    first = results[0]
    assert first["backend"] == "detcomm"
    assert first["numerics_id"] == "tree/1:float32"
    assert first["deterministic"]
    assert "call this first" in first["again"]
    assert first["put back"]
    for found in results:
        assert found["sums"] == {"tree": [0, 0, 0], "ring": [1, 1, 0]}, "element i of the ring ends at rank i"
        assert found["norms"] == first["norms"]
        assert found["state"] == first["state"]
        assert found["everywhere"] == first["everywhere"]
    assert len(first["norms"]) == 1
    _check_report(first["here"])
    _check_all_ranks(first["everywhere"])
    assert first["state"]["groups"] == {
        "WORLD": {"sizes": [3], "numerics_id": "tree/1:float32"},
        "DATA_PARALLEL_GROUP": {"sizes": [3], "numerics_id": "tree/1:float32"},
        "CONTEXT_PARALLEL_GROUP": {"sizes": [3], "numerics_id": "ring/1[1]:float32"},
        "PIPELINE_MODEL_PARALLEL_GROUP": {"sizes": [3], "numerics_id": "stock"},
        "TENSOR_MODEL_PARALLEL_GROUP": {"sizes": [1], "numerics_id": "tree/1:float32"},
        "EMBEDDING_GROUP": {"sizes": [2], "numerics_id": "tree/1:float32"},
    }


def _check_report(report: Any) -> None:
    groups = {group.description: group for group in report.groups}
    assert {name: (group.backend, group.chosen_by, group.numerics_id) for name, group in groups.items()} == {
        "WORLD": ("detcomm", "policy", "tree/1:float32"),
        "DATA_PARALLEL_GROUP": ("detcomm", "policy", "tree/1:float32"),
        "CONTEXT_PARALLEL_GROUP": ("detcomm", "policy", "ring/1[1]:float32"),
        "PIPELINE_MODEL_PARALLEL_GROUP": ("gloo", "policy", None),
        "DATA_PARALLEL_GROUP_GLOO": ("gloo", "Megatron", None),
        "TENSOR_MODEL_PARALLEL_GROUP": ("detcomm", "policy", "tree/1:float32"),
        "EMBEDDING_GROUP": ("detcomm", "policy", "tree/1:float32"),
        "of the script": ("cpu:gloo,cuda:gloo", "elsewhere", None),
    }
    assert groups["DATA_PARALLEL_GROUP"].num_calls == 4, "a sum and three norms"
    assert groups["CONTEXT_PARALLEL_GROUP"].num_calls == 1
    assert groups["TENSOR_MODEL_PARALLEL_GROUP"].num_calls is None
    assert report.unused_rules == ("MODEL_PARALLEL_GROUP=stock",)
    assert "DATA_PARALLEL_GROUP: Megatron's is_high_priority_stream ignored" in report.notes
    assert "of the script: no known release of Megatron makes it" in report.notes


def _check_all_ranks(report: Any) -> None:
    made = [group.ranks for group in report.groups if group.description == "TENSOR_MODEL_PARALLEL_GROUP"]
    assert made == [(0,), (1,), (2,)]
    assert [group.ranks for group in report.groups if group.description == "EMBEDDING_GROUP"] == [(0, 1)]
