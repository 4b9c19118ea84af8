# SPDX-License-Identifier: Apache-2.0
"""The short way of the calls made most on CUDA tensors: one tensor, on the current stream, which captures no graph.

As ``detcomm.direct_calls`` for tensors of the CPU: what a call was prepared to be when it last came is found by the
types and sizes of its tensors. Both ways end in the same native call; what is out of the ordinary takes the long one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from detcomm import torch_calls
from detcomm.collectives import Collective
from detcomm.cuda.communicator import CudaCommunicator
from detcomm.cuda.native_call import Streams
from detcomm.cuda.prepared import Prepared
from detcomm.torch_calls import Batch

_CACHED_CALLS = 1024
_PREMUL_SUM = dist._make_nccl_premul_sum(1.0).op.value  # type: ignore[attr-defined]

_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


class KnownCall(NamedTuple):
    """A call that has come before.

    Attributes:
        in_place_offset: bytes from input to output where each element of the output lies on its own of the input.
    """

    prepared: Prepared
    label: str
    in_place_offset: int


class CudaDirectCalls:
    """One group's. ``find_...`` gives ``None`` for what must take the long way.

    Args:
        communicator: connected.
        side: the stream for folds of pipelined plans.
    """

    def __init__(self, communicator: CudaCommunicator, side: int) -> None:
        self._communicator = communicator
        self._run = communicator.run_prepared
        self._streams = Streams(0, side)
        self._device = communicator.kernels.device
        self._side = side
        self._known: dict[tuple[Any, ...], KnownCall] = {}

    def find_all_reduce(self, tensor: torch.Tensor, op: Any) -> KnownCall | None:
        """A tensor in place."""
        if not self._is_plain(tensor):
            return None
        key = (op.op.value, tensor.dtype, tensor.numel())
        return self._known.get(key) or self._learn(key, lambda: torch_calls.all_reduce("all_reduce", [tensor], op))

    def find_reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: Any) -> KnownCall | None:
        """Equal shards of one input."""
        if not (self._is_plain(output) and self._is_plain(input)):
            return None
        key = (op.op.value, input.dtype, input.numel(), output.dtype, output.numel())
        name, world_size = "reduce_scatter_tensor", self._communicator.world_size
        known = self._known.get(key) or self._learn(
            key, lambda: torch_calls.reduce_scatter(name, [output], [input], op, world_size)
        )
        return self._if_apart(known, output, input)

    def find_all_gather(self, output: torch.Tensor, input: torch.Tensor) -> KnownCall | None:
        """Equal shards of one output."""
        if not (self._is_plain(output) and self._is_plain(input)):
            return None
        key = (input.dtype, input.numel(), output.dtype, output.numel())
        name, world_size = "all_gather_into_tensor", self._communicator.world_size
        known = self._known.get(key) or self._learn(
            key, lambda: torch_calls.all_gather(name, [output], [input], world_size)
        )
        return self._if_apart(known, output, input)

    def run(self, known: KnownCall, source: int, target: int, timeout_s: float) -> None:
        """On the current stream; ``source`` and ``target`` are addresses.

        Raises:
            TransportError: NCCL or CUDA refused; the group is unusable.
        """
        stream = _current_stream(self._device)
        if stream != self._streams.main:
            self._streams = Streams(stream, self._side)
        self._run(known.prepared, known.label, source, target, self._streams, timeout_s)

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.get_device() == self._device == _current_device()
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and not (tensor.is_neg() or tensor.is_conj() or _is_capturing())
        )

    def _if_apart(self, known: KnownCall | None, output: torch.Tensor, input: torch.Tensor) -> KnownCall | None:
        """Not where they overlap in another way than element by element."""
        if known is None:
            return None
        offset = output.data_ptr() - input.data_ptr()
        overlaps = -output.nbytes < offset < input.nbytes
        return None if overlaps and offset != known.in_place_offset else known

    def _learn(self, key: tuple[Any, ...], batch: Callable[[], Batch]) -> KnownCall | None:
        if key[0] == _PREMUL_SUM:  # each rank has its own factor, on the GPU perhaps, and each call another one
            return None
        (request,) = batch().requests
        prepared = self._communicator.find_prepared(request)
        if prepared is None or prepared.program is None:
            return None
        call = prepared.call
        offset = 0
        if call.shard_counts is not None:
            offset = call.shard_starts[self._communicator.rank] * call.dtype.itemsize
        if len(self._known) >= _CACHED_CALLS:
            self._known = {}
        signed = -offset if call.collective is Collective.ALL_GATHER else offset
        known = self._known[key] = KnownCall(prepared, request.label, signed)
        return known
