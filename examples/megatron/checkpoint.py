# SPDX-License-Identifier: Apache-2.0
"""Save and load by Megatron's ``dist_checkpointing``: weights, optimizer, step, and under which order of additions.

The optimizer's state is written in the model's own coordinates, so a run can go on with other buckets or another number
of data-parallel ranks.
"""

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch import Tensor

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def save(folder: str, chunks: list[torch.nn.Module], optimizer: Any, step: int, contract: Any) -> None:
    """Write a checkpoint, on all ranks together.

    Args:
        folder: is made; must not hold a checkpoint already.
        step: how many steps have been done.
        contract: what must be equal for a resumed run to have the bits of an uninterrupted one, of plain types.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    state = _state(chunks, optimizer, is_loading=False) | {"step": step, "detcomm": contract}
    dist_checkpointing.save(state, folder)


def read_contract(folder: str) -> Any:
    """The ``contract`` of a checkpoint, before anything else of it is read."""
    return dist_checkpointing.load_common_state_dict(folder).get("detcomm")


def load(folder: str, chunks: list[torch.nn.Module], optimizer: Any) -> int:
    """Fill model and optimizer from a checkpoint, on all ranks together; how many steps it has done."""
    for part in _parts(optimizer):
        _prepare(part)
    state = dist_checkpointing.load(_state(chunks, optimizer, is_loading=True), folder)
    for index, chunk in enumerate(chunks):
        _bare(chunk).load_state_dict(state[f"model{index}"], strict=True)
    optimizer.load_state_dict(state["optimizer"])
    for part in _parts(optimizer):
        for entry in part.optimizer.state.values():
            entry["step"] = entry["step"].clone()  # Megatron gives all parameters one tensor, which each would count up
    return int(state["step"])


def _state(chunks: list[torch.nn.Module], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for index, chunk in enumerate(chunks):
        state[f"model{index}"] = _bare(chunk).sharded_state_dict(metadata=_METADATA)
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=_METADATA)
    return state


def _bare(chunk: Any) -> Any:
    """The model inside the wrappers of data parallelism and of mixed precision."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _parts(optimizer: Any) -> list[Any]:
    """Megatron's optimizers around torch's: one, or one each for dense parameters and for experts."""
    return [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if part.optimizer is not None]


def _prepare(part: Any) -> None:
    """Make a fresh optimizer ready to be loaded into.

    Apex's and TransformerEngine's Adam count steps per group, torch's per parameter in its state. Megatron does not
    allocate such counts before it loads, and then looks for them among the tensors that it has loaded.
    """
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            part.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    set_states = getattr(part, "_set_main_param_and_optimizer_states", None)
    if set_states is None:  # not the distributed optimizer
        return

    def set_all_but_step(model_parameter: Tensor, tensors: dict[str, Tensor]) -> None:
        group_index, index = part.model_param_group_index_map[model_parameter]
        state = part.optimizer.state[part.optimizer.param_groups[group_index]["params"][index]]
        set_states(model_parameter, {"step": state["step"], **tensors})

    part._set_main_param_and_optimizer_states = set_all_but_step
