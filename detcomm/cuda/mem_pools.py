# SPDX-License-Identifier: Apache-2.0
"""Pools of torch's allocator whose memory the ranks of a group read from each other: tensors in them are not staged.

Registered as with stock NCCL, by ``register_mem_pool`` of a group's backend for CUDA; so what Megatron and others do
for NCCL's user buffers does it here, too. Speed only: a tensor that is in no such pool is staged, with the same bits.
"""

from typing import Any

from detcomm.cuda.peer_memory.memory import PeerMemory
from detcomm.cuda.peer_memory.registration import Part
from detcomm.errors import UsageError


def register(memory: PeerMemory, pool: Any, device: int, timeout_s: float) -> int:
    """Have the peers map what a pool holds now, and is not mapped yet; all ranks of the block call this.

    Args:
        pool: a ``torch.cuda.MemPool``; kept, and so its memory, until ``deregister`` or the end of the group.
        device: its memory on this one.

    Returns:
        How many bytes of this rank were mapped.

    Raises:
        UsageError: memory of some rank cannot be shared, with one text on all ranks of the block; nothing is mapped.
        PeerTimeoutError, TransportError: ranks did not come, or the group has failed.
    """
    parts = [part for part in segments(pool, device) if memory.regions.find(*part) is None]
    reason = memory.register(parts, pool, timeout_s)
    if reason:
        raise UsageError(f"register_mem_pool: the pool's memory cannot be shared between the ranks: {reason}")
    return sum(num_bytes for _, num_bytes in parts)


def segments(pool: Any, device: int) -> list[Part]:
    """Beginnings and bytes of what a pool has of a device, ascending."""
    found = [segment for segment in pool.snapshot() if segment["device"] == device]
    return sorted((int(segment["address"]), int(segment["total_size"])) for segment in found)
