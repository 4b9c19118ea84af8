# SPDX-License-Identifier: Apache-2.0
"""What all groups of a process share on one device: its kernels, and the lock under which work is issued to it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from detcomm.cuda.kernels import Kernels
from detcomm.cuda.self_check import check_device
from detcomm.errors import UnsupportedError

_device_locks: dict[int, threading.RLock] = {}


PATIENCE_S = 0.5
"""How long a thread waits for the lock of a device. Who holds it longer is connecting: NCCL does so inside the first
call that needs a connection, and waits for the peer's call there, which may wait for what this thread is to issue."""


def device_lock(device: int) -> threading.RLock:
    """Held while anything of a group is issued to a device, a stock group's operations included.

    To be taken with ``PATIENCE_S``, and gone on without.
    """
    return _device_locks.setdefault(device, threading.RLock())


@contextmanager
def issuing_to(device: int) -> Iterator[None]:
    """Hold the lock of a device, if it is to be had."""
    lock = device_lock(device)
    is_held = lock.acquire(timeout=PATIENCE_S)
    try:
        yield
    finally:
        if is_held:
            lock.release()


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
