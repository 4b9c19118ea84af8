# SPDX-License-Identifier: Apache-2.0
"""Torch's suite with more ranks than GPUs: it is told that each rank has one, and ranks share those that there are.

For the tests that ask the suite which GPU is theirs. Those that take their rank for the number of a GPU fail where
there are fewer, with stock NCCL as with detcomm.
"""

import os
from typing import Any

import torch
from torch.testing._internal import common_distributed, common_utils

from detcomm.shared_gpus import variables


def share(world_size: int) -> bool:
    """Whether the ranks share GPUs; if so, the suite is made to. Before ``distributed_test`` is imported.

    CUDA must not be started, or no rank could be forked from this process: ``PYTORCH_NVML_BASED_CUDA_CHECK=1``.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus >= world_size:
        return False
    set_device, start_cuda = torch.cuda.set_device, torch.cuda._lazy_init

    def set_shared_device(device: Any) -> None:
        index = torch.device(device).index if isinstance(device, str | torch.device) else int(device)
        set_device(None if index is None else index % num_gpus)

    def shared_gpus(size: int, backend: str) -> dict[int, list[int]]:
        return {rank: [rank % num_gpus] for rank in range(size)}

    def start_cuda_with_what_there_is() -> None:
        if torch.cuda.is_initialized() or torch.cuda.device_count() == num_gpus:
            return start_cuda()  # type: ignore[no-any-return, no-untyped-call]
        torch.cuda.device_count = lambda: num_gpus
        try:
            start_cuda()  # type: ignore[no-untyped-call]
        finally:
            torch.cuda.device_count = lambda: world_size

    torch.cuda._lazy_init = start_cuda_with_what_there_is
    torch.cuda.device_count = lambda: world_size
    torch.cuda.set_device = set_shared_device
    common_distributed.init_multigpu_helper = shared_gpus
    return True


def leave_cuda_alone() -> None:
    """Ranks are forked from this process, so it must not start CUDA; the suite's look at disabled tests would."""
    common_utils.check_if_enable = lambda test: None


def be_a_host(rank: int) -> None:
    """In a rank, before its first NCCL call."""
    os.environ.update(variables(rank))
