# SPDX-License-Identifier: Apache-2.0
"""The same digest over torch tensors: on a GPU in torch's int64 arithmetic, which wraps, so that no copy is needed.

Must give the bits of ``digest.py``. Also knows where a DTensor's shard lies in the whole.
"""

from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from detcomm.errors import UnsupportedError, UsageError
from detcomm.golden.digest import GAMMA, MASK, MIXES, Digest, digest_of_array
from detcomm.golden.positions import Axis, Grid, Place, place_of

_CHUNK_ELEMS = 1 << 22
"""Elements that are mixed at once on a device: 32 MiB a temporary."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of_tensor(values: Any, offset: int = 0, indices: Any = None) -> Digest:
    """See ``digest``; waits for the device."""
    lanes = device_lanes(*locate(values, offset, indices))
    first, second = lanes if isinstance(lanes, tuple) else lanes.tolist()
    return Digest((first & MASK, second & MASK))


def locate(values: Any, offset: int = 0, indices: Any = None) -> tuple[torch.Tensor, Place]:
    """The tensor that this rank holds, and where it lies in the whole.

    Raises:
        UnsupportedError: no dense tensor of numbers, or a DTensor that is a pending sum.
        UsageError: offset or indices do not fit.
    """
    if not isinstance(values, torch.Tensor):
        raise UnsupportedError(f"digest: expected a NumPy array or a torch tensor, got {type(values).__name__}")
    if isinstance(values, DTensor):
        if offset != 0 or indices is not None:
            raise UsageError("digest: a DTensor knows its place; offset and indices are for plain tensors")
        grid = dtensor_grid(values)
        local = values.to_local().detach()
        return local, place_of(0, grid, local.shape)
    values = values.detach()
    if values.layout != torch.strided or values.is_quantized or values.is_meta:
        raise UnsupportedError(f"digest: expected a dense tensor with memory, got {values.layout} on {values.device}")
    return values, place_of(offset, indices, values.shape)


def device_lanes(tensor: torch.Tensor, place: Place) -> Any:
    """The two lanes: two numbers for a CPU tensor, otherwise an int64 tensor of two on the device, not waited for."""
    if tensor.device.type == "cpu":
        return digest_of_array(_as_array(tensor), place).lanes
    return mixed_on_device(tensor, place)


def mixed_on_device(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """The lanes by torch's arithmetic, wherever the tensor is."""
    words, width = _words(tensor)
    per_element = max(1, width // 8)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CHUNK_ELEMS * per_element):
        chunk = words[start : start + _CHUNK_ELEMS * per_element].to(torch.int64)
        if width < 8:
            chunk &= (1 << 8 * width) - 1  # the conversion has extended the sign
        first, last = start // per_element, (start + chunk.numel()) // per_element
        index = place.at(torch.arange(first, last, dtype=torch.int64, device=tensor.device))
        if per_element > 1:
            second = torch.arange(per_element, dtype=torch.int64, device=tensor.device)
            index = (index[:, None] * per_element + second).reshape(-1)
        keyed = index + _signed(width * GAMMA)
        for lane in range(2):
            mixed = keyed.clone()
            _mix(mixed, lane)
            mixed ^= chunk
            _mix(mixed, lane)
            total[lane] += mixed.sum()
    return total


def dtensor_grid(tensor: DTensor) -> Grid:
    """Where this rank's shard lies in the whole.

    Raises:
        UnsupportedError: the shards are pending summands of the values, no parts of them.
    """
    mesh, axes = tensor.device_mesh, [range(size) for size in tensor.shape]
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedError("digest: this rank is not in the mesh of the DTensor")
    result: list[Axis] = list(axes)
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Partial):
            raise UnsupportedError(f"digest: a DTensor that is a pending sum ({placement}); redistribute it first")
        if isinstance(placement, Replicate):
            continue
        num_shards, own = mesh.size(mesh_dim), coordinate[mesh_dim]
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise UnsupportedError(f"digest: unknown placement {placement}")
        axis = result[dim]
        if type(placement) is Shard and isinstance(axis, range):
            size = -(-len(axis) // num_shards)
            result[dim] = axis[min(own * size, len(axis)) : min((own + 1) * size, len(axis))]
        else:  # torch's own rule, for what is sharded twice along a dimension in another order
            numbers = torch.from_numpy(np.asarray(axis, dtype=np.int64)).reshape(*[1] * dim, -1)
            split: Any = placement
            shards, _ = split._split_tensor(numbers, num_shards, with_padding=False, contiguous=True)
            result[dim] = shards[own].reshape(-1).numpy()
    return Grid(tuple(result), tuple(tensor.shape))


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    if tensor.is_complex():
        tensor = tensor.resolve_conj()
    tensor = tensor.resolve_neg()
    width = tensor.element_size()
    if width not in _WORDS and tensor.dtype != torch.complex128:
        raise UnsupportedError(f"digest: elements of {tensor.dtype} have no bits that are specified")
    return tensor.contiguous().reshape(-1).view(_WORDS[min(8, width)]), width


def _as_array(tensor: torch.Tensor) -> Any:
    """The bits of a CPU tensor as an array whose type has the same width, without a copy."""
    words, width = _words(tensor)
    array = words.numpy()
    return array.view(np.complex128) if width == 16 else array


def _mix(z: torch.Tensor, lane: int) -> None:
    shifts, factors = MIXES[lane]
    for shift, factor in zip(shifts, (*factors, 1), strict=True):
        z ^= (z >> shift) & (MASK >> shift)  # the shift of int64 draws the sign in
        if factor != 1:
            z *= _signed(factor)


def _signed(number: int) -> int:
    number &= MASK
    return number - (1 << 64) if number >> 63 else number
