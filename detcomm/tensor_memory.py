# SPDX-License-Identifier: Apache-2.0
"""The memory of a tensor as the core takes it: a run of bytes of the host, or of a GPU. Knows no calls."""

import ctypes
from typing import Any

import numpy as np
import torch

from detcomm.errors import UnsupportedError, UsageError
from detcomm.memory import DeviceMemory
from detcomm.transports.base import Bytes

_MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_STRIDED = torch.strided
_NO_BYTES: Bytes = np.empty(0, dtype=np.uint8)


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Refuse what is not one run of memory of the CPU or of a GPU.

    Raises:
        UnsupportedError: another device, a sparse layout.
        UsageError: not contiguous, or a lazy conjugate or negation.
    """
    if not (tensor.is_cpu or tensor.is_cuda):
        raise UnsupportedError(f"{name}: tensors on {tensor.device} are not supported; expected cpu or cuda")
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"{name}: expected a dense tensor, got layout {tensor.layout}")
    if not tensor.is_contiguous():
        memory_format = _MEMORY_FORMATS.get(tensor.dim())
        if memory_format is None or not tensor.is_contiguous(memory_format=memory_format):
            shape, strides = tuple(tensor.shape), tuple(tensor.stride())
            raise UsageError(f"{name}: expected a contiguous tensor, got shape {shape} with strides {strides}")
    if tensor.is_neg() or tensor.is_conj():
        raise UsageError(f"{name}: the tensor is a lazy conjugate or negation; call resolve_conj() and resolve_neg()")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a run of the CPU's memory in the common form. ``check_dense`` takes more, or says what is wrong."""
    return (
        tensor.is_cpu
        and tensor.layout is _STRIDED
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj())
    )


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """The memory of a checked tensor. The caller keeps the tensor alive."""
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return no_bytes(tensor)
    return memory_at(tensor.data_ptr(), num_bytes, tensor.is_cuda)


def memory_at(address: int, num_bytes: int, is_cuda: bool) -> Bytes:
    """A run of bytes. On a GPU a ``DeviceMemory``, which only the CUDA half of a group ever looks at."""
    if is_cuda:
        memory: Any = DeviceMemory(address, num_bytes)
        return memory  # type: ignore[no-any-return]
    # Not Tensor.numpy(): it knows no bfloat16, float8 or complex conjugates, and refuses what requires a gradient.
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return np.frombuffer(memory, dtype=np.uint8)


def no_bytes(like: torch.Tensor) -> Bytes:
    """Nothing, where ``like`` is."""
    return memory_at(0, 0, True) if like.is_cuda else _NO_BYTES
