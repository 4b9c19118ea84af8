# SPDX-License-Identifier: Apache-2.0
"""Pools registered with a group: which group takes them, and what a failure does to it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import detcomm
from detcomm.errors import TransportError, UsageError
from detcomm.lazy_cuda import LazyCuda
from detcomm.mem_pool_methods import MemPoolMethods


class _Cuda:
    """In place of a group's half for CUDA tensors."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.told: list[tuple[str, Any, float]] = []

    def register_mem_pool(self, pool: Any, timeout_s: float) -> None:
        self.told.append(("register", pool, timeout_s))
        if self.error is not None:
            raise self.error

    def deregister_mem_pool(self, pool: Any, timeout_s: float) -> None:
        self.told.append(("deregister", pool, timeout_s))


class _Group:
    timeout_s = 7.0

    def __init__(self, world_size: int, error: Exception | None = None) -> None:
        self.world_size = world_size
        self.cuda = _Cuda(error)
        self.losses: list[Exception] = []

    def check_usable(self) -> None:
        if self.losses:
            raise self.losses[0]

    def lost(self, error: TransportError) -> TransportError:
        self.losses.append(error)
        return TransportError(f"the first cause of {error}")


class _Backend(MemPoolMethods):
    def __init__(self, group: Any) -> None:
        self._group = group


def test_a_pool_goes_to_the_half_for_cuda_tensors() -> None:
    group = _Group(2)
    backend = _Backend(group)
    backend.register_mem_pool("pool", symm=True)
    backend.deregister_mem_pool("pool")
    assert group.cuda.told == [("register", "pool", 7.0), ("deregister", "pool", 7.0)]


def test_without_peers_there_is_nothing_to_do() -> None:
    group = _Group(1)
    _Backend(group).register_mem_pool("pool")
    _Backend(group).deregister_mem_pool("pool")
    assert group.cuda.told == []


def test_a_lost_peer_makes_the_group_unusable_and_a_refusal_does_not() -> None:
    group = _Group(2, UsageError("cannot be shared"))
    with pytest.raises(UsageError, match="cannot be shared"):
        _Backend(group).register_mem_pool("pool")
    assert group.losses == []
    group = _Group(2, TransportError("rank 1 is gone"))
    backend = _Backend(group)
    with pytest.raises(TransportError, match="the first cause of rank 1 is gone"):
        backend.register_mem_pool("pool")
    with pytest.raises(TransportError):
        backend.deregister_mem_pool("pool")
    assert len(group.cuda.told) == 1


class _Connected:
    """A connected group whose bytes NCCL carries."""

    peer_memory = None

    def communicator_on(self, device: torch.device, capturing: bool) -> "_Connected":
        return self


def test_ranks_that_read_no_memory_of_each_other_take_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    connected: Any = _Connected()
    cuda = LazyCuda("g", lambda: connected)
    with pytest.raises(UsageError, match="group g: its ranks read no memory of each other"):
        cuda.register_mem_pool("pool", 1.0)


@pytest.fixture
def alone() -> Iterator[Any]:
    dist.init_process_group("detcomm", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.distributed_c10d._get_default_group()
    dist.destroy_process_group()


def test_torchs_backend_for_cuda_has_the_methods(alone: Any) -> None:
    backend = alone._get_backend(torch.device("cuda"))
    backend.register_mem_pool("pool")
    backend.deregister_mem_pool("pool")
    assert not backend.supports_tensor_alloc(torch.device("cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_symmetric_memory_needs_a_device() -> None:
    with pytest.raises(UsageError, match="no CUDA device"), detcomm.symmetric_memory():
        pass
