# SPDX-License-Identifier: Apache-2.0
"""All-reduce of sparse COO tensors: the union of the ranks' indices, then a dense all-reduce of the values there.

An index that a rank does not hold counts as zero there, so the bits are those of the dense all-reduce of
``to_dense()``. Not for ``ring``, whose order of additions would depend on where the other ranks' indices lie.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from detcomm import torch_calls
from detcomm.errors import UnsupportedError, UsageError
from detcomm.group import Group
from detcomm.work import FinishedWork

_NAME = "sparse all_reduce"


def all_reduce_sparse(group: Group, tensors: Sequence[torch.Tensor], op: Any, timeout: timedelta | None) -> dist.Work:
    """Reduce one sparse tensor in place; done when it returns.

    Raises:
        UnsupportedError: a layout other than COO, another operation than SUM, ``ring``.
        MismatchError: shapes or types differ between the ranks.
    """
    if len(tensors) != 1:
        raise UsageError(f"{_NAME}: expected one tensor, got {len(tensors)}")
    tensor = tensors[0]
    if tensor.layout is not torch.sparse_coo or not tensor.is_cpu:
        raise UnsupportedError(f"{_NAME}: expected a COO tensor on cpu, got {tensor.layout} on {tensor.device}")
    if getattr(op, "op", op) != dist.ReduceOp.SUM:
        raise UnsupportedError(f"{_NAME}: expected SUM, got {op}")
    if group.options.association == "ring":
        raise UnsupportedError(f"{_NAME}: the order of additions of ring depends on the other ranks' indices")
    own = tensor.detach().coalesce()
    indices, values = own.indices(), own.values()
    union = _union(_gather_indices(group, indices, timeout))
    at = _positions(union, indices)
    dense = torch.zeros((union.size(1), *values.shape[1:]), dtype=values.dtype)
    dense[at] = values
    batch = torch_calls.all_reduce(_NAME, [dense], op)
    group.reduce(_NAME, batch, False, timeout)
    result = torch.sparse_coo_tensor(union, dense, tensor.shape, is_coalesced=True)
    with torch.no_grad():
        tensor.copy_(result)
    return FinishedWork([tensor])


def _gather_indices(group: Group, indices: torch.Tensor, timeout: timedelta | None) -> list[torch.Tensor]:
    """The indices of all ranks, ``[sparse_dims, nnz]`` each."""
    sparse_dims, nnz = indices.shape
    counts = torch.empty(group.world_size, dtype=torch.int64)
    own_count = torch.tensor([nnz], dtype=torch.int64)
    group.reduce(_NAME, torch_calls.all_gather(_NAME, [counts], [own_count], group.world_size), False, timeout)
    gathered = [torch.empty((sparse_dims, int(count)), dtype=torch.int64) for count in counts]
    batch = torch_calls.all_gather_lists([gathered], [indices.contiguous()], group.rank)
    group.reduce(_NAME, batch, False, timeout)
    return gathered


def _union(gathered: Sequence[torch.Tensor]) -> torch.Tensor:
    """All indices once, in lexicographic order."""
    union: torch.Tensor = torch.unique(torch.cat(list(gathered), dim=1), sorted=True, dim=1)
    return union


def _positions(union: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Where each of ``indices`` stands in ``union``, which holds it."""
    inverse: torch.Tensor
    _, inverse = torch.unique(torch.cat([union, indices], dim=1), sorted=True, return_inverse=True, dim=1)
    return inverse[union.size(1) :]
