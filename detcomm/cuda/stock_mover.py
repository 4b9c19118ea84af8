# SPDX-License-Identifier: Apache-2.0
"""Bytes moved by the public calls of a stock NCCL group: what the reference path has in place of NCCL's functions."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from detcomm.cuda.reference_call import Parcel
from detcomm.memory import DeviceMemory


class StockMover:
    """A mover of one group on one device.

    Args:
        inner: gives the stock group; asked for when something is to be moved.
    """

    def __init__(self, inner: Callable[[], Any], device: torch.device) -> None:
        self._inner = inner
        self._device = device

    def copy(self, stream: int, src: DeviceMemory, dst: DeviceMemory) -> None:
        with self._on(stream):
            self._tensor(dst).copy_(self._tensor(src))

    def exchange(self, stream: int, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> None:
        inner = self._inner()
        with self._on(stream):
            inner._start_coalescing()
            for peer, memory in sends:
                inner.send([self._tensor(memory)], peer, 0)
            for peer, memory in recvs:
                inner.recv([self._tensor(memory)], peer, 0)
            inner._end_coalescing().wait()

    def gather(self, stream: int, src: DeviceMemory, dst: DeviceMemory) -> None:
        with self._on(stream):
            self._inner()._allgather_base(self._tensor(dst), self._tensor(src)).wait()

    def _on(self, stream: int) -> Any:
        if stream == 0:  # ExternalStream takes 0 for the wish of a new one
            return torch.cuda.stream(torch.cuda.default_stream(self._device))
        where: Any = torch.cuda.ExternalStream(stream, self._device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(where)

    def _tensor(self, memory: DeviceMemory) -> torch.Tensor:
        return view(memory, self._device)


def view(memory: DeviceMemory, device: torch.device) -> torch.Tensor:
    """Device memory as a tensor of bytes."""
    return torch.as_tensor(_Array(memory), device=device)


class _Array:
    """Device memory as libraries show it to each other."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.size,),
            "typestr": "|u1",
            "data": (memory.start, False),
            "version": 3,
        }
