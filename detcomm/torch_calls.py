# SPDX-License-Identifier: Apache-2.0
"""What torch hands over, as requests of the core: tensors become bytes, reduce operations become ours.

Everything is checked here, before anything is sent. Knows tensors and calls; neither groups nor transports.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from detcomm.call import Call, even_shards
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.errors import UnsupportedError, UsageError
from detcomm.header import call_text
from detcomm.request import Request
from detcomm.tensor_memory import check_dense, is_plain, memory_at, no_bytes, tensor_bytes
from detcomm.transports.base import Bytes

_DTYPES: dict[torch.dtype, DType] = {getattr(torch, dtype.value): dtype for dtype in DType}
_OPERATIONS: dict[Any, ReduceOp] = {getattr(dist.ReduceOp, op.name): op for op in ReduceOp}
_CACHED_CALLS = 1024


@dataclass(slots=True, eq=False)
class Batch:
    """One torch call: the requests that are agreed on together, each reduced by itself.

    Attributes:
        results: what the call's future holds.
        tensors: kept alive until the requests are done, since the requests hold bare addresses.
        gather: run just before the requests; fills staging memory from the caller's tensors.
        scatter: run just after them; empties staging memory into the caller's tensors.
    """

    requests: list[Request]
    results: list[torch.Tensor]
    tensors: Sequence[torch.Tensor]
    gather: Callable[[], None] | None = None
    scatter: Callable[[], None] | None = None

    @property
    def text(self) -> str:
        """Everything of its calls that the ranks must agree on."""
        return "\n".join(call_text(request.call, request.label) for request in self.requests)

    @property
    def device(self) -> torch.device:
        """Where all its tensors are.

        Raises:
            UsageError: they are not on one device.
        """
        device = self.tensors[0].device
        for tensor in self.tensors:
            if tensor.device != device:
                raise UsageError(f"expected all tensors on one device, got {device} and {tensor.device}")
        return device


def operation(op: Any) -> tuple[ReduceOp, float | None]:
    """The operation, and the factor of a PREMUL_SUM.

    Raises:
        UnsupportedError: an operation that detcomm does not know.
    """
    known = _OPERATIONS.get(getattr(op, "op", op))
    if known is None:
        raise UnsupportedError(f"unknown reduce operation {op}")
    if known is not ReduceOp.PREMUL_SUM:
        return known, None
    factor = op.__getstate__()[1]
    return known, float(factor.item() if isinstance(factor, torch.Tensor) else factor)


def _enumerated(op: Any) -> int:
    number: int = op.op.value
    return number


_EVERY_OPERATION = [
    dist._make_nccl_premul_sum(1.0) if known is ReduceOp.PREMUL_SUM else dist.ReduceOp(op)
    for op, known in _OPERATIONS.items()
]

# torch hashes an operation to its number, in a third of the time; where a release should not, the long way is taken.
operation_number: Callable[[Any], int] = (
    hash if all(hash(op) == _enumerated(op) for op in _EVERY_OPERATION) else _enumerated
)
"""The number of an object of torch's ``ReduceOp``, whatever its factor is."""


@lru_cache(maxsize=_CACHED_CALLS)
def _call(
    collective: Collective,
    dtype: torch.dtype,
    shards: int | tuple[int, ...],
    op: ReduceOp | None,
    root: int = 0,
) -> tuple[Call, str]:
    """The call and its label. ``shards``: elements, or the elements of each rank's shard."""
    known = _DTYPES.get(dtype)
    label = ""
    scale = 1
    if known is None or known.kind == "complex":
        label = str(dtype).removeprefix("torch.")
    if known is None:
        if collective.reduces:
            raise UnsupportedError(f"{collective.value}: no arithmetic is specified on {label}")
        known, scale = DType.UINT8, dtype.itemsize  # moved as bytes
    elif known.kind == "complex":
        if op is not None and op not in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM):
            raise UnsupportedError(f"{collective.value}: {op.value} is not defined on {label}")
        known, scale = known.real, 2
    if isinstance(shards, int):
        return Call(collective, known, shards * scale, op, root=root), label
    counts = tuple(count * scale for count in shards)
    return Call(collective, known, sum(counts), op, counts), label


def all_reduce(name: str, tensors: Sequence[torch.Tensor], op: Any) -> Batch:
    """Each tensor in place."""
    reduce_op, factor = operation(op)
    requests = []
    for tensor in tensors:
        check_dense(name, tensor)
        call, label = _call(Collective.ALL_REDUCE, tensor.dtype, tensor.numel(), reduce_op)
        data = tensor_bytes(tensor)
        requests.append(Request(call, data, data, factor, label))
    return Batch(requests, list(tensors), tensors)


def all_reduce_alone(name: str, tensors: Sequence[torch.Tensor], op: Any) -> bool:
    """Whether there is nothing to do in a world of one rank: every bit stays, unless the sender multiplies.

    Checks as much as ``all_reduce`` does, and builds nothing; groups of one rank are called often.
    """
    for tensor in tensors:
        if not is_plain(tensor):
            check_dense(name, tensor)
        if not _stays_alone(tensor.dtype, getattr(op, "op", op)):
            return False
    return True


@lru_cache(maxsize=_CACHED_CALLS)
def _stays_alone(dtype: torch.dtype, op: Any) -> bool:
    """Whether an all-reduce of one rank is nothing; raises what any all-reduce of this type and operation does."""
    known = _OPERATIONS.get(op)
    if known is None or known is ReduceOp.PREMUL_SUM:
        return False
    _call(Collective.ALL_REDUCE, dtype, 1, known)
    return True


def reduce(tensor: torch.Tensor, op: Any, root: int, rank: int) -> Batch:
    """In place on the root; the other ranks' tensors keep their bits."""
    reduce_op, factor = operation(op)
    check_dense("reduce", tensor)
    call, label = _call(Collective.REDUCE, tensor.dtype, tensor.numel(), reduce_op, root)
    data = tensor_bytes(tensor)
    request = Request(call, data, data if rank == root else no_bytes(tensor), factor, label)
    return Batch([request], [tensor], [tensor])


def reduce_scatter(
    name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: Any, world_size: int
) -> Batch:
    """Equal shards of each input, along its memory."""
    reduce_op, factor = operation(op)
    requests = []
    for output, input in _pairs(name, outputs, inputs):
        _check_sizes(name, input, output, world_size, "input", "output")
        shards = even_shards(input.numel(), world_size)
        call, label = _call(Collective.REDUCE_SCATTER, input.dtype, shards, reduce_op)
        requests.append(Request(call, tensor_bytes(input), tensor_bytes(output), factor, label))
    return Batch(requests, list(outputs), [*outputs, *inputs])


def reduce_scatter_list(output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Any, rank: int) -> Batch:
    """One input tensor for each rank; their sizes may differ."""
    reduce_op, factor = operation(op)
    name = "reduce_scatter"
    _check_list(name, [output, *inputs])
    if output.numel() != inputs[rank].numel():
        raise UsageError(f"{name}: the output has {output.numel()} elements, input {rank} has {inputs[rank].numel()}")
    call, label = _call(Collective.REDUCE_SCATTER, output.dtype, tuple(part.numel() for part in inputs), reduce_op)
    whole, staging = _as_one(inputs)
    batch = Batch([Request(call, whole, tensor_bytes(output), factor, label)], [output], [output, *inputs])
    if staging is not None:
        batch.tensors = [*batch.tensors, staging]
        batch.gather = lambda: _copy_in(staging, inputs)
    return batch


def all_gather(name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], world_size: int) -> Batch:
    """Each output holds the inputs of all ranks, one after the other."""
    requests = []
    for output, input in _pairs(name, outputs, inputs):
        _check_sizes(name, output, input, world_size, "output", "input")
        call, label = _call(Collective.ALL_GATHER, input.dtype, even_shards(output.numel(), world_size), None)
        requests.append(Request(call, tensor_bytes(input), tensor_bytes(output), None, label))
    return Batch(requests, list(outputs), [*outputs, *inputs])


def all_gather_lists(outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], rank: int) -> Batch:
    """``outputs[i][r]`` receives rank r's ``inputs[i]``; the sizes of one list may differ."""
    name = "all_gather"
    requests = []
    staged: list[tuple[torch.Tensor, Sequence[torch.Tensor]]] = []
    kept: list[torch.Tensor] = [*inputs]
    for parts, input in zip(outputs, inputs, strict=True):
        _check_list(name, [input, *parts])
        if parts[rank].numel() != input.numel():
            raise UsageError(f"{name}: output {rank} has {parts[rank].numel()} elements, the input {input.numel()}")
        call, label = _call(Collective.ALL_GATHER, input.dtype, tuple(part.numel() for part in parts), None)
        whole, staging = _as_one(parts)
        if staging is not None:
            staged.append((staging, parts))
            kept.append(staging)
        requests.append(Request(call, tensor_bytes(input), whole, None, label))
        kept += parts
    results = [part for parts in outputs for part in parts]
    batch = Batch(requests, results, kept)
    if staged:
        batch.scatter = lambda: _copy_out(staged)
    return batch


def _pairs(
    name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if len(outputs) != len(inputs) or not outputs:
        raise UsageError(f"{name}: expected as many outputs as inputs, got {len(outputs)} and {len(inputs)}")
    return list(zip(outputs, inputs, strict=True))


def _check_sizes(
    name: str, whole: torch.Tensor, part: torch.Tensor, world_size: int, whole_name: str, part_name: str
) -> None:
    check_dense(name, whole)
    check_dense(name, part)
    if whole.dtype is not part.dtype:
        raise UsageError(f"{name}: the {whole_name} is {whole.dtype}, the {part_name} {part.dtype}")
    if whole.numel() != part.numel() * world_size:
        raise UsageError(
            f"{name}: expected {part.numel()} x {world_size} = {part.numel() * world_size} elements in the "
            f"{whole_name}, got {whole.numel()}"
        )


def _check_list(name: str, tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        check_dense(name, tensor)
        if tensor.dtype is not tensors[0].dtype:
            raise UsageError(f"{name}: the tensors' types differ: {tensors[0].dtype} and {tensor.dtype}")


def _as_one(parts: Sequence[torch.Tensor]) -> tuple[Bytes, torch.Tensor | None]:
    """The parts as one run of bytes: their own memory if it is one run, otherwise staging memory."""
    sizes = [part.numel() * part.element_size() for part in parts]
    total = sum(sizes)
    if not total:
        return no_bytes(parts[0]), None
    occupied = [(part.data_ptr(), size) for part, size in zip(parts, sizes, strict=True) if size]
    if all(left[0] + left[1] == right[0] for left, right in pairwise(occupied)):
        return memory_at(occupied[0][0], total, parts[0].is_cuda), None
    staging = torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype, device=parts[0].device)
    return tensor_bytes(staging), staging


def _copy_in(staging: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for view, part in zip(_views(staging, parts), parts, strict=True):
            view.copy_(part)


def _copy_out(staged: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]]) -> None:
    with torch.no_grad():
        for staging, parts in staged:
            for view, part in zip(_views(staging, parts), parts, strict=True):
                part.detach().copy_(view)


def _views(staging: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The pieces of staging memory, shaped as the parts that they stand for."""
    views = []
    start = 0
    for part in parts:
        views.append(staging[start : start + part.numel()].view(part.shape))
        start += part.numel()
    return views
