# SPDX-License-Identifier: Apache-2.0
"""The half of a group for CUDA tensors, made when the first one comes: until then nothing of CUDA's is imported.

Before that every method is a no-op, so that a group of CPU tensors need not ask.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from detcomm.coalescing import Block
from detcomm.errors import UnsupportedError, UsageError
from detcomm.movement import Movement
from detcomm.torch_calls import Batch

if TYPE_CHECKING:
    from detcomm.cuda.direct_calls import CudaDirectCalls
    from detcomm.cuda.group import CudaGroup
    from detcomm.cuda.peer_memory.memory import PeerMemory


class LazyCuda:
    """A ``CudaGroup``, or none yet.

    Attributes:
        direct: the short way of plain calls, once the group is connected.

    Args:
        name: of the group, for error texts.
        make: makes it; ``None`` for a group that takes no CUDA tensors.
        has_short_way: whether calls may be issued without a word to the other ranks before.
    """

    def __init__(self, name: str, make: "Callable[[], CudaGroup] | None", has_short_way: bool = True) -> None:
        self._name = name
        self._make = make
        self._has_short_way = has_short_way
        self.direct: CudaDirectCalls | None = None
        self._made: CudaGroup | None = None
        self._lock = threading.Lock()

    @property
    def sequence(self) -> int:
        """Collectives so far."""
        return 0 if self._made is None else self._made.sequence

    def movement(self, device: torch.device, is_in_block: bool) -> Movement:
        """What moves tensors on this device."""
        from detcomm.cuda.movement import CudaMovement

        return CudaMovement(self._get(), device, is_in_block)

    def reduce(self, name: str, batch: Batch, asynchronous: bool, timeout_s: float) -> dist.Work:
        """See ``CudaGroup.reduce``."""
        made = self._get()
        work = made.reduce(name, batch, asynchronous, timeout_s)
        if self.direct is None and self._has_short_way:
            self.direct = made.direct_calls()
        return work

    def register_mem_pool(self, pool: Any, timeout_s: float) -> None:
        """See ``MemPoolMethods``; on the current device."""
        from detcomm.cuda import mem_pools

        device = torch.device("cuda", torch.cuda.current_device())
        mem_pools.register(self._peer_memory(device), pool, device.index, timeout_s)

    def deregister_mem_pool(self, pool: Any, timeout_s: float) -> None:
        """See ``MemPoolMethods``; on the current device."""
        self.synchronize(timeout_s)
        self._peer_memory(torch.device("cuda", torch.cuda.current_device())).deregister(pool, timeout_s)

    def close_block(self, block: Block, reduce: Callable[[Batch], dist.Work]) -> list[Any]:
        """Issue what an open block has gathered of CUDA tensors; its works."""
        if self._made is None and not block.has_reductions_on_gpu:
            return []
        works = [self._get().close_block(), block.issue_on_gpu(reduce)]
        return [work for work in works if work is not None]

    def synchronize(self, timeout_s: float) -> None:
        """Block the host until everything issued is done."""
        if self._made is not None:
            self._made.synchronize(timeout_s)

    def keep_process(self) -> None:
        """An error to come was asked for: it need not end the process."""
        if self._made is not None:
            self._made.ends_process = False

    def fail(self, error: BaseException) -> None:
        """The group has failed. May end the process."""
        if self._made is not None:
            self._made.fail(error)

    def close(self, patience_s: float) -> bool:
        """Finish what is in flight and release everything; whether it was done within ``patience_s``."""
        self._make = None  # it holds network devices, which cost descriptors until the last reference is gone
        return self._made is None or self._made.close(patience_s)

    def _peer_memory(self, device: torch.device) -> "PeerMemory":
        memory = self._get().communicator_on(device, capturing=False).peer_memory
        if memory is None:
            raise UsageError(
                f"group {self._name}: its ranks read no memory of each other, so a pool cannot be registered; see "
                "cuda_transport in docs/gpu.md"
            )
        return memory

    def _get(self) -> "CudaGroup":
        with self._lock:
            if self._made is None:
                if self._make is None:
                    raise UnsupportedError(f"group {self._name} takes no CUDA tensors")
                self._made = self._make()
            return self._made
