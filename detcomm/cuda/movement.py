# SPDX-License-Identifier: Apache-2.0
"""Data movement of CUDA tensors without arithmetic: a stock NCCL group's business, its works and streams included.

As ``detcomm.movement`` is for host memory: tensor by tensor as plain bytes, so every type moves and every bit stays.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from detcomm import movement_call
from detcomm.cuda.device import issuing_to
from detcomm.cuda.group import CudaGroup
from detcomm.errors import UsageError
from detcomm.movement import Movement, Posting, bytes_of
from detcomm.movement_call import MovementCall
from detcomm.splits import Splits
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

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any) -> Posting:
        name = movement_call.ALL_TO_ALL
        call = self._list_call(name, outputs, inputs)
        received, sent = bytes_of(name, outputs), bytes_of(name, inputs)
        splits = Splits([part.numel() for part in sent], [part.numel() for part in received])
        return self._posting(name, "alltoall", [received, sent, opts], outputs, call, splits)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> Posting:
        raise UsageError("recv: NCCL cannot receive from any rank; name the source")

    def stock(self, label: str, call: Callable[[], Any], results: Sequence[torch.Tensor]) -> Posting:
        def post() -> dist.Work:
            with issuing_to(self._device.index):
                work: dist.Work = call()
                return work

        return Posting(label, partial(self._issue, post), list(results), on_gpu=True)

    def _posting(
        self,
        label: str,
        method: str,
        args: list[Any],
        results: Sequence[torch.Tensor],
        call: MovementCall | None = None,
        splits: Splits | None = None,
        finish: Callable[[], None] | None = None,
    ) -> Posting:
        assert finish is None, "NCCL receives in place"
        post = partial(self._issue, partial(self._group.move, method, self._device, *args))
        return Posting(label, post, list(results), call, splits, on_gpu=True)

    def _issue(self, post: Callable[[], dist.Work]) -> dist.Work:
        if self._is_in_block:
            self._group.open_block(self._device)
        work = post()
        return FINISHED if self._is_in_block else work  # the block has the work


def _no_loss(error: Any) -> Any:
    """Stock NCCL finds its own losses: its watchdog ends the process."""
    return error
