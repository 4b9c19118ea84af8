# SPDX-License-Identifier: Apache-2.0
"""What all groups of a process share on one device: its kernels, and the lock under which work is issued to it."""

import threading
from functools import cache

import torch

from detcomm.cuda.kernels import Kernels
from detcomm.cuda.self_check import check_device
from detcomm.errors import UnsupportedError

_device_locks: dict[int, threading.RLock] = {}


def device_lock(device: int) -> threading.RLock:
    """Held while anything of a group is issued to a device, a stock group's operations included."""
    return _device_locks.setdefault(device, threading.RLock())


@cache
def kernels_of(device: int) -> Kernels:
    """The kernels of a device, checked with golden vectors.

    Raises:
        NativeError: no driver, no compiler, or wrong bits.
    """
    if torch.version.cuda is None:
        raise UnsupportedError("CUDA tensors of a torch without CUDA")
    kernels = Kernels(device)
    where = torch.device("cuda", device)
    stream = torch.cuda.current_stream(where)
    check_device(
        kernels,
        lambda data: torch.from_numpy(data).to(where),
        lambda tensor: tensor.cpu().numpy(),
        stream.cuda_stream,
    )
    return kernels
