# SPDX-License-Identifier: Apache-2.0
"""``batch_isend_irecv`` of CUDA tensors as one NCCL group, also on torch 2.11 to 2.13.

There torch coalesces for its own process group class alone, and issues the sends and receives of any other one by one:
NCCL would wait in a send whose receive stands behind it. So torch's function is wrapped for detcomm's groups.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from detcomm.process_group import ProcessGroup


def install() -> None:
    """Wrap the function in both modules that show it. Idempotent."""
    stock = distributed_c10d.batch_isend_irecv
    if getattr(stock, "_is_detcomm", False):
        return
    wrapped = _wrap(stock)
    distributed_c10d.batch_isend_irecv = wrapped
    dist.batch_isend_irecv = wrapped


def _wrap(stock: Callable[[Any], Any]) -> Any:
    @functools.wraps(stock)
    def batch_isend_irecv(p2p_op_list: Any) -> Any:
        group = _group_of(p2p_op_list)
        if not isinstance(group, ProcessGroup) or not p2p_op_list[0].tensor.is_cuda:
            return stock(p2p_op_list)
        distributed_c10d._check_p2p_op_list(p2p_op_list)
        device = p2p_op_list[0].tensor.device
        with distributed_c10d._coalescing_manager(group, device, async_ops=True) as block:
            for op in p2p_op_list:
                peer = {"group_dst" if op.op is distributed_c10d.isend else "group_src": op.group_peer}
                op.op(op.tensor, group=op.group, tag=op.tag, **peer)
        return block.works

    marked: Any = batch_isend_irecv
    marked._is_detcomm = True
    return marked


def _group_of(p2p_op_list: Any) -> Any:
    if not isinstance(p2p_op_list, list) or not p2p_op_list:
        return None
    return getattr(p2p_op_list[0], "group", None) or distributed_c10d._get_default_group()
