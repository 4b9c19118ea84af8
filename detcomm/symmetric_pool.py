# SPDX-License-Identifier: Apache-2.0
"""``detcomm.symmetric_memory``: CUDA tensors that the other ranks of the host read where they lie.

A collective of CUDA tensors whose ranks read each other's memory copies what it is given into a staging area first,
since its peers cannot see a rank's private memory. Tensors allocated here they can. Speed only: the bits are the same,
and a tensor may lie in such memory on one rank and not on another.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from detcomm.errors import UsageError


@contextmanager
def symmetric_memory(*groups: Any) -> Iterator[Any]:
    """What this thread allocates on the current device inside is read in place by the peers, from the end on.

    All ranks of the groups leave the block together, as they call a collective. The memory stays shared until a group
    ends or ``deregister_mem_pool`` of its backend is called with the pool.

    Example:
        with detcomm.symmetric_memory(data_parallel_group):
            model = DistributedDataParallel(model, process_group=data_parallel_group)

    Args:
        groups: of detcomm; the default group if none is given.

    Yields:
        The ``torch.cuda.MemPool``.

    Raises:
        UsageError: no CUDA device; or the memory cannot be shared between the ranks, with one text on all of them.
        PeerTimeoutError, TransportError: ranks did not come, or a group has failed.
    """
    if not torch.cuda.is_available():
        raise UsageError("symmetric_memory: this process has no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    pool = _shareable_pool(device)
    with torch.cuda.use_mem_pool(pool):
        yield pool
    for group in groups or (dist.distributed_c10d._get_default_group(),):
        group._get_backend(device).register_mem_pool(pool)


def _shareable_pool(device: torch.device) -> Any:
    """A pool of plain allocations; of torch's symmetric memory where plain ones would be of expandable segments."""
    make_pool: Any = torch.cuda.MemPool
    pool = make_pool()
    with torch.cuda.use_mem_pool(pool):
        torch.empty(1, device=device)
    if not any(segment.get("is_expandable") for segment in pool.snapshot()):
        return pool
    symmetric: Any = torch._C._distributed_c10d._SymmetricMemory
    return make_pool(symmetric.get_mempool_allocator(device))
