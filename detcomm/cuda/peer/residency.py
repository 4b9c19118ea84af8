# SPDX-License-Identifier: Apache-2.0
"""How many blocks of a group may wait for peers while they hold a place on the GPU: agreed when the group connects.

A block that waits keeps others out. If those that wait filled a GPU, the blocks that they wait for could be among those
left out, for ever. So all groups of all processes on a device together get at most a third of its places; a group that
comes too late for a share goes the way on which only one block waits.

Knows the store and a device's size, neither plans nor kernels.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from detcomm import store_access
from detcomm.cuda.kernels import Kernels
from detcomm.errors import PeerTimeoutError

_BLOCKS_PER_PROCESSOR = 1
"""Its 65,536 registers have room for three of 256 threads with 80 registers each: the most that a kernel here has."""

LEAST_BLOCKS = 4
"""A share of less would be slower than the other way."""

_lock = threading.Lock()
_held: dict[int, int] = {}
"""Blocks that this process's groups hold, by device."""


class _Told(NamedTuple):
    """What a rank says of its device."""

    bus: str
    num_processors: int
    held: int


def agree_on_blocks(
    store: Any,
    rank: int,
    world_size: int,
    kernels: Kernels,
    most: int,
    timeout_s: float,
    has_failed: Callable[[], bool],
) -> int:
    """The share of a group, the same on all its ranks; 0 for none. To be given back by ``give_back``.

    Args:
        store: a key space of this agreement alone.
        most: blocks that are wanted.

    Raises:
        PeerTimeoutError: ranks did not come; names them.
    """
    with _lock:  # until it is known how many, all that are wanted: another group may connect meanwhile
        own = _Told(kernels.bus, kernels.num_processors, _held.get(kernels.device, 0))
        _held[kernels.device] = own.held + most
    blocks = 0
    try:
        blocks = _agree(store, own, rank, world_size, most, timeout_s, has_failed)
    finally:
        give_back(kernels.device, most - blocks)
    return blocks


def _agree(
    store: Any,
    own: _Told,
    rank: int,
    world_size: int,
    most: int,
    timeout_s: float,
    has_failed: Callable[[], bool],
) -> int:
    store.set(str(rank), f"{own.bus} {own.num_processors} {own.held}")
    texts = store_access.read_all(store, [str(peer) for peer in range(world_size)], timeout_s, has_failed)
    late = [peer for peer, text in enumerate(texts) if text is None]
    if late:
        raise PeerTimeoutError(f"ranks {late} did not say how busy their GPUs are")
    told = [_Told(bus, int(processors), int(held)) for bus, processors, held in (str(text).split() for text in texts)]
    share = min(each.num_processors * _BLOCKS_PER_PROCESSOR // _sharing(told, each) - each.held for each in told)
    return min(share, most) if share >= LEAST_BLOCKS else 0


def give_back(device: int, blocks: int) -> None:
    """A group has ended."""
    with _lock:
        _held[device] = _held.get(device, 0) - blocks


def _sharing(told: list[_Told], one: _Told) -> int:
    return sum(each.bus == one.bus for each in told)
