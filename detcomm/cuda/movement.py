# SPDX-License-Identifier: Apache-2.0
"""Data movement of CUDA tensors without arithmetic: a stock NCCL group's business, its works and streams included.

As ``detcomm.movement`` is for host memory: tensor by tensor as plain bytes, so every type moves and every bit stays.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from detcomm.cuda.device import device_lock
from detcomm.cuda.group import CudaGroup
from detcomm.errors import UsageError
from detcomm.movement import Movement, bytes_of
from detcomm.work import FINISHED


class CudaMovement(Movement):
    """Movement on one device of a group.

    Args:
        group: whose stock NCCL group does the work.
        device: where the tensors are.
        is_in_block: whether a coalescing block is open on this thread: then operations become one NCCL group.
    """

    def __init__(self, group: CudaGroup, device: torch.device, is_in_block: bool) -> None:
        super().__init__(group.movement(device), _no_loss)
        self._group = group
        self._device = device
        self._is_in_block = is_in_block

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any) -> dist.Work:
        name = "all_to_all"
        args = [bytes_of(name, outputs), bytes_of(name, inputs)]
        return self._post(name, "alltoall", args, outputs, opts)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> dist.Work:
        raise UsageError("recv: NCCL cannot receive from any rank; name the source")

    def issue_stock(self, label: str, call: Callable[[], Any], results: Sequence[torch.Tensor]) -> dist.Work:
        if self._is_in_block:
            self._group.open_block(self._device)
        with device_lock(self._device.index):
            work: dist.Work = call()
        return FINISHED if self._is_in_block else work  # the block has the work

    def _post(
        self,
        label: str,
        method: str,
        args: list[Any],
        results: Sequence[torch.Tensor],
        opts: Any = None,
        finish: Callable[[], None] | None = None,
    ) -> dist.Work:
        assert finish is None, "NCCL receives in place"
        if self._is_in_block:
            self._group.open_block(self._device)
        work = self._group.move(method, self._device, *args, *([] if opts is None else [opts]))
        return FINISHED if self._is_in_block else work  # the block has the work


def _no_loss(error: Any) -> Any:
    """Stock NCCL finds its own losses: its watchdog ends the process."""
    return error
