# SPDX-License-Identifier: Apache-2.0
"""A gradient norm that no partition of the gradients changes, in the place of Megatron's.

With the distributed optimizer each rank sums the squares of its own shards, and shards follow buckets: another bucket
size, another rounding, another clip coefficient, another value of every parameter. The exact sum has no such choice:
it is the same for every bucket size, with and without the distributed optimizer, on CPU and GPU.

Which gradients count (no duplicates of tensor parallelism, no shared parameters) is decided by Megatron, before.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from detcomm.errors import UnsupportedError
from detcomm.megatron.exact_squares import SquareSum

MODULE, FUNCTION = "megatron.core.optimizer.clip_grads", "get_grad_norm_fp32"


def exact_grad_norm(tensors: Iterable[torch.Tensor], groups: Iterable[Any]) -> float:
    """The 2-norm of the gradients of all ranks, rounded once to float64.

    Args:
        tensors: this rank's; float32, bfloat16 or float16; may be none.
        groups: process groups over which the sums of squares are added, one after the other; ``None`` is the world.

    Raises:
        UnsupportedError: another type.
    """
    local = list(tensors)
    total = SquareSum.of(local).to_tensor(_device_of(local))
    for group in groups:
        dist.all_reduce(total, group=group)  # integers: the same in any order, over any backend
    return SquareSum.from_tensor(total).root()


def replacing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``get_grad_norm_fp32`` with the exact sum."""

    def get_grad_norm_fp32(
        grads_for_norm: list[torch.Tensor] | torch.Tensor,
        norm_type: int | float = 2,
        grad_stats_parallel_group: Any = None,
    ) -> Any:
        if float(norm_type) == math.inf:
            return original(grads_for_norm, norm_type, grad_stats_parallel_group)  # a maximum has no order
        if float(norm_type) != 2:
            raise UnsupportedError(f"exact gradient norm: expected the 2-norm or the maximum, got p={norm_type}")
        from megatron.core.utils import get_data_parallel_group_if_dtensor, to_local_if_dtensor

        grads = [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else grads_for_norm
        sharded_over = None
        for grad in grads:
            sharded_over = get_data_parallel_group_if_dtensor(grad, sharded_over)
        groups = [grad_stats_parallel_group] if sharded_over is None else [sharded_over, grad_stats_parallel_group]
        return exact_grad_norm([to_local_if_dtensor(grad) for grad in grads], groups)

    return get_grad_norm_fp32


def _device_of(tensors: list[torch.Tensor]) -> torch.device:
    """Where the sum travels from: a rank without gradients must choose as the others do."""
    if tensors:
        return tensors[0].device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
