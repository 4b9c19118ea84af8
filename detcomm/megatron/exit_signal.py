# SPDX-License-Identifier: Apache-2.0
"""Makes Megatron's ``--exit-signal-handler`` work: it knows no backend but nccl and gloo, and raises otherwise.

The handler asks at each step whether any rank has had the signal, so that all ranks save and leave together. The
backend's name tells it where a tensor of one flag must lie that is gathered over all ranks; nothing else depends on it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

MODULE, FUNCTION = "megatron.training.dist_signal_handler", "get_device"

_KNOWN_TO_MEGATRON = ("nccl", "gloo")


def replacing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``get_device``, for groups of ours too.

    A group of several backends has the name of none of them, so what is asked for is what the machine has.
    """

    def get_device(local_rank: int | None = None) -> Any:
        if dist.get_backend() in _KNOWN_TO_MEGATRON:
            return original(local_rank)
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda") if local_rank is None else torch.device("cuda", local_rank)

    return get_device
