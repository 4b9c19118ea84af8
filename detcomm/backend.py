# SPDX-License-Identifier: Apache-2.0
"""The other form of the backend: a ``Backend`` inside a stock process group, for torch >= 2.14.

Of a Python work, torch 2.14's wrapper passes on ``wait`` and ``get_future`` alone: ``is_completed`` never becomes true,
and a ``recv`` without a source cannot tell from whom it received. ``split_group`` is for the other form alone.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend as C10dBackend

from detcomm.errors import UsageError
from detcomm.group import Group
from detcomm.mem_pool_methods import MemPoolMethods
from detcomm.process_group import BACKEND_NAME
from detcomm.torch_methods import TorchMethods

_HELD: set["Backend"] = set()
"""Backends until their end. Under TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps a backend and keeps the C++ half alone,
which knows none of the methods below once the Python half is gone."""


class Backend(TorchMethods, MemPoolMethods, C10dBackend):
    """The collectives of one group. Names, devices and subgroups are the stock process group's."""

    def __init__(self, group: Group) -> None:
        C10dBackend.__init__(self, group.rank, group.world_size)
        self._group = group
        _HELD.add(self)

    def abort(self) -> None:
        _HELD.discard(self)
        super().abort()

    def shutdown(self) -> None:
        _HELD.discard(self)
        super().shutdown()

    @property
    def supports_coalescing(self) -> bool:
        return True

    @property
    def options(self) -> C10dBackend.Options:
        """As torch's own options, which say little; without it, torch asks itself for ever."""
        return C10dBackend.Options(BACKEND_NAME, timedelta(seconds=self._group.timeout_s))

    def getBackendName(self) -> str:
        return BACKEND_NAME

    def name(self) -> str:
        return BACKEND_NAME

    def start_coalescing(self) -> None:
        self._group.open_block()

    def end_coalescing(self) -> dist.Work:
        return self._group.close_block()

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    def allreduce_sparse(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """As gloo's. torch passes its options object here, and a timeout to the process group's method."""
        timeout = getattr(opts, "timeout", opts)
        if timeout is not None and not isinstance(timeout, timedelta):
            raise UsageError(f"monitored_barrier: expected a timeout, got {timeout!r}")
        super().monitored_barrier(timeout if timeout is not None and timeout >= timedelta(0) else None, wait_all_ranks)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)
