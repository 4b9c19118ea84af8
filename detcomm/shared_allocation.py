# SPDX-License-Identifier: Apache-2.0
"""``detcomm.shared_empty``: tensors that the other ranks of the host read where they lie.

A large collective over shared memory copies what it is given into a staging buffer first, since its peers cannot see a
rank's private memory. Of a tensor made here they can: if a message lies in such memory on every rank, nothing is
staged. The bits are the same either way.
"""

import ctypes
import math
import weakref
from collections.abc import Sequence

import torch

from detcomm.errors import UsageError
from detcomm.transports.shared_heap import process_heap


def shared_empty(shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A contiguous CPU tensor of zeros in this process's shared memory, freed with the last tensor that uses it.

    After a ``TransportError`` in a collective on it, its content is undefined: a peer may still be writing.

    Example:
        gradients = detcomm.shared_empty(num_parameters, torch.bfloat16)  # then all_reduce it, or views of it

    Args:
        shape: its sizes, in elements.
        dtype: any type of torch.

    Raises:
        UsageError: a negative size, or the shared memory of this process is used up.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(size < 0 for size in sizes):
        raise UsageError(f"shared_empty: expected sizes of at least 0, got {sizes}")
    count = math.prod(sizes)
    if count == 0:
        return torch.empty(sizes, dtype=dtype)
    heap = process_heap()
    num_bytes = count * dtype.itemsize
    address = heap.allocate(num_bytes)
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    weakref.finalize(memory, heap.free, address, num_bytes).atexit = False
    return torch.frombuffer(memory, dtype=dtype).view(sizes)  # keeps ``memory`` alive
