# SPDX-License-Identifier: Apache-2.0
"""Groups that can go over to the stock library and back: the same group object, since Megatron keeps it everywhere.

Each group of detcomm has a stock one inside, for data movement. While ``fixed_order`` is off reductions and all-gathers
go to it as well, by torch's own way. Who may change that, and when, is not said here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from detcomm import torch_backend
from detcomm.cuda_process_group import CudaProcessGroup
from detcomm.errors import UsageError
from detcomm.movement import process_group_around
from detcomm.process_group import ProcessGroup

SWITCHED_BACKEND_NAME = "detcomm_switched"
"""A name of its own for torch, which makes groups by the name of their backend."""

SWITCHED_METHODS = (
    *("allreduce", "allreduce_coalesced", "reduce"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced"),
    *("_allgather_base", "allgather_into_tensor_coalesced"),
)
"""What adds, or is detcomm's own for speed, under all the names of torch 2.11 to 2.14. The rest is stock anyway."""


class SwitchedProcessGroup(ProcessGroup):
    """``ProcessGroup`` with a switch."""

    fixed_order = True

    def shutdown(self) -> None:
        _forget_stock_groups(self)
        super().shutdown()


class SwitchedCudaProcessGroup(CudaProcessGroup):
    """``CudaProcessGroup`` with a switch; its CPU tensors are stock gloo's in any case."""

    fixed_order = True

    def shutdown(self) -> None:
        _forget_stock_groups(self)
        super().shutdown()


def register() -> None:
    """Make the backend known to torch. Idempotent."""
    if SWITCHED_BACKEND_NAME.upper() not in dist.Backend._plugins:
        devices = torch_backend.DEVICES
        dist.Backend.register_backend(SWITCHED_BACKEND_NAME, create, extended_api=True, devices=devices)


def create(backend_options: Any, pg_options: Any) -> ProcessGroup:
    """What torch calls for a new group; see ``torch_backend.create``.

    Raises:
        UsageError: the other form of the backend was asked for, which has no such groups.
    """
    made = torch_backend.create(backend_options, pg_options)
    if not isinstance(made, ProcessGroup):
        raise UsageError(f"{torch_backend.FORM_VARIABLE}=backend: groups that switch between steps need the other form")
    kind = SwitchedCudaProcessGroup if isinstance(made, CudaProcessGroup) else SwitchedProcessGroup
    switched: ProcessGroup = kind(made._store, made._group, made._make_subgroup)
    return switched


def _either(kind: type[ProcessGroup], name: str) -> Callable[..., dist.Work]:
    fixed = getattr(kind, name)

    def method(self: Any, *args: Any, **options: Any) -> dist.Work:
        tensors = () if self.fixed_order else _tensors(args[0])
        if self.fixed_order or (isinstance(self, CudaProcessGroup) and not tensors[0].is_cuda):
            work: dist.Work = fixed(self, *args, **options)
            return work
        self._group.check_usable()
        movement = self._group.movement_of(tensors)
        stock = getattr(_stock_group(self, tensors[0].device.type, movement.inner), name)
        posting = movement.stock(name, partial(stock, *args, **options), tensors)
        stock_work: dist.Work = self._group.move(posting, None)
        return stock_work

    method.__name__ = name
    method.__doc__ = fixed.__doc__
    return method


def _stock_group(group: Any, device: str, inner: Any) -> Any:
    known: dict[str, Any] = vars(group).setdefault("_stock_groups", {})
    if device not in known:
        known[device] = process_group_around(inner, device, group.get_group_store())
    return known[device]


def _forget_stock_groups(group: Any) -> None:
    """They hold the inner backends, and those hold network devices."""
    vars(group).pop("_stock_groups", None)


def _tensors(results: Any) -> Sequence[torch.Tensor]:
    """The first argument of a collective, where its results go: a tensor, a list, or lists of lists."""
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for part in results for tensor in _tensors(part)]


for _kind in (SwitchedProcessGroup, SwitchedCudaProcessGroup):
    for _name in SWITCHED_METHODS:
        setattr(_kind, _name, _either(_kind, _name))
