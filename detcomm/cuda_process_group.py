# SPDX-License-Identifier: Apache-2.0
"""A group of ``"cpu:gloo,cuda:detcomm"``: CUDA tensors are detcomm's, CPU tensors stay with stock gloo.

torch drops the gloo backend that it has made for such a group as soon as a Python process group comes back for
another device, so the inner group takes its place: stock, with stock gloo's order of additions, as was asked for.
"""

from typing import Any

import torch
import torch.distributed as dist

from detcomm.errors import UsageError
from detcomm.movement import process_group_around
from detcomm.process_group import ProcessGroup

_ROUTED_METHODS = (
    *("allreduce", "allreduce_coalesced", "reduce"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced"),
    *("_allgather_base", "allgather_into_tensor_coalesced"),
    *("broadcast", "gather", "scatter"),
)
"""The collectives of a process group that are not gloo's anyway, under all names of torch 2.11 to 2.14."""


class CudaProcessGroup(ProcessGroup):
    """``ProcessGroup`` for CUDA tensors beside stock gloo for CPU tensors."""

    _around_stock: Any = None

    def _get_backend(self, device: Any) -> Any:
        return self._cuda_backend if torch.device(device).type == "cuda" else self._stock()

    def _stock(self) -> Any:
        """The stock group for CPU tensors.

        Raises:
            UsageError: this group was not given one.
        """
        self._group.check_usable()
        known = dist.distributed_c10d._world.pg_backend_config.get(self)
        if known is not None and "cpu:gloo" not in known.split(","):
            raise UsageError(f"group {self._name} has no backend for CPU tensors; it was made with {known!r}")
        return self._group.movement.inner

    def _stock_group(self) -> Any:
        """The same with all methods of a process group, as torch calls them."""
        inner = self._stock()
        if self._around_stock is None:
            self._around_stock = process_group_around(inner, "cpu", self.get_group_store())
        return self._around_stock

    def shutdown(self) -> None:
        self._around_stock = None  # it holds the stock backend, and that holds network devices
        super().shutdown()


def _routed(name: str) -> Any:
    ours = getattr(ProcessGroup, name)

    def method(self: CudaProcessGroup, *args: Any, **kwargs: Any) -> dist.Work:
        if _first_device(args).type == "cpu":
            work: dist.Work = getattr(self._stock_group(), name)(*args, **kwargs)
            return work
        routed: dist.Work = ours(self, *args, **kwargs)
        return routed

    method.__name__ = name
    method.__doc__ = ours.__doc__
    return method


for _name in _ROUTED_METHODS:
    setattr(CudaProcessGroup, _name, _routed(_name))


def _first_device(args: tuple[Any, ...]) -> torch.device:
    """The device of the first tensor among possibly nested lists; empty lists stand on non-roots."""
    for arg in args:
        while isinstance(arg, list | tuple) and arg:
            arg = arg[0]
        if isinstance(arg, torch.Tensor):
            return arg.device
    return torch.device("cpu")
