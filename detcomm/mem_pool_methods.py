# SPDX-License-Identifier: Apache-2.0
"""Pools of CUDA memory registered with a group, under the names that stock NCCL's backend has for it.

All ranks of the group call these, in the same order among their collectives. Knows nothing of how memory is shared.
"""

from typing import Any

from detcomm.errors import TransportError
from detcomm.group import Group


class MemPoolMethods:
    """What stock NCCL's backend has beside its collectives; both forms inherit it."""

    _group: Group

    def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
        """Have the peers read in place, from now on, what a pool holds now; again after it has grown.

        Args:
            pool: a ``torch.cuda.MemPool``; kept until ``deregister_mem_pool`` or the end of the group.
            symm: NCCL's; nothing here needs memory to be alike on all ranks.

        Raises:
            UsageError: the ranks read no memory of each other, or the pool's cannot be shared; on all ranks.
            PeerTimeoutError, TransportError: ranks did not come, or the group has failed.
        """
        self._group.check_usable()
        if self._group.world_size == 1:
            return  # there are no peers
        try:
            self._group.cuda.register_mem_pool(pool, self._group.timeout_s)
        except TransportError as error:
            raise self._group.lost(error) from error

    def deregister_mem_pool(self, pool: Any) -> None:
        """Take a pool back, after all calls that were issued; captured graphs that use it must not be replayed.

        Raises:
            PeerTimeoutError, TransportError: ranks did not come, or the group has failed.
        """
        self._group.check_usable()
        if self._group.world_size == 1:
            return
        try:
            self._group.cuda.deregister_mem_pool(pool, self._group.timeout_s)
        except TransportError as error:
            raise self._group.lost(error) from error
