# SPDX-License-Identifier: Apache-2.0
"""What a model and its optimizer hold, by names that do not change with the wrapper around the model.

Knows torch's modules and optimizers, nothing of ranks and hashes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from detcomm.errors import UnsupportedError

Model = nn.Module | Mapping[str, torch.Tensor]
"""A module, or parameters by name."""

Optimizer = torch.optim.Optimizer | Mapping[str, Any]
"""An optimizer, or its state by name: tensors, numbers, or mappings and lists of them."""

_WRAPPERS = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put in front of the names of parameters."""


def parameters(model: Model) -> dict[str, torch.Tensor]:
    """All parameters by name; one that is shared has the first of its names."""
    if isinstance(model, Mapping):
        return dict(model)
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod")
    return {_plain(name) if wrapped else name: parameter for name, parameter in model.named_parameters()}


def gradients(model: Model) -> dict[str, torch.Tensor]:
    """The gradients that are there, by the names of their parameters."""
    return {name: parameter.grad for name, parameter in parameters(model).items() if parameter.grad is not None}


def state(optimizer: Optimizer, model: Model | None) -> Iterator[tuple[str, Any]]:
    """Name and value of all that an optimizer keeps: ``<parameter>.<key>``. Numbers come as arrays.

    A parameter that the model does not have is named by its place in the optimizer.

    Raises:
        UnsupportedError: the state holds something that is neither a tensor nor a number.
    """
    if isinstance(optimizer, Mapping):
        yield from _leaves("", optimizer)
        return
    names = {} if model is None else {id(parameter): name for name, parameter in parameters(model).items()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter in optimizer.state:
                name = names.get(id(parameter), f"group{number}.{place}")
                yield from _leaves(name, optimizer.state[parameter])


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if value is None:
        return
    if isinstance(value, torch.Tensor | np.ndarray):
        yield name, value
    elif isinstance(value, bool | int | float | np.generic):
        yield name, np.asarray(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, inner in enumerate(value):
            yield from _leaves(f"{name}.{index}" if name else str(index), inner)
    else:
        raise UnsupportedError(
            f"golden run: optimizer state {name} is a {type(value).__name__}, not a tensor or number"
        )


def _plain(name: str) -> str:
    while name.startswith(_WRAPPERS):
        name = name.removeprefix("module.").removeprefix("_orig_mod.")
    return name.replace("._orig_mod.", ".")
