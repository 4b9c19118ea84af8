# SPDX-License-Identifier: Apache-2.0
"""Which schedule, and which piece size: speed only, never a bit.

A pure function of values that are equal on all ranks (the call, the association, the world size, the block size), so
that all ranks choose alike without a word between them.
"""

from detcomm.association import Association
from detcomm.call import Call
from detcomm.collectives import Collective
from detcomm.errors import ScheduleError
from detcomm.schedule import Schedule
from detcomm.schedules import Binomial, Oneshot, Ring, direct, halving, hierarchical

ONESHOT_BYTES = 32 << 10
"""Up to here the latency of a second step costs more than the bytes that everybody receives."""

ONESHOT_WORLD = 16
"""Beyond this world size N-1 messages a rank cost more than a few steps."""

DIRECT_WORLD = 64
"""Beyond this world size a rank would post too many messages at once."""

CHUNK_BYTES = 8 << 20
"""Bytes of one pipelined piece of the whole message: bounds scratch, long enough to hide a step's latency."""


def choose_schedule(call: Call, association: Association, world_size: int, block_size: int) -> Schedule:
    """The schedule for a call.

    Args:
        block_size: ranks of one aligned block that share a host; 1 where blocks cross hosts.
    """
    message_bytes = call.count * call.dtype.itemsize
    small = message_bytes <= ONESHOT_BYTES
    if small and world_size <= ONESHOT_WORLD:
        return Oneshot()
    if association.name == "ring" and call.collective.reduces:
        return direct(world_size) if world_size <= 8 else Ring()
    if association.name == "linear" and call.collective.reduces:
        return direct(world_size)
    if small and call.collective in (Collective.ALL_REDUCE, Collective.REDUCE):
        return Binomial()
    if 1 < block_size < world_size:
        return hierarchical(world_size, block_size)
    return direct(world_size) if world_size <= DIRECT_WORLD else halving(world_size)


def legal_schedules(call: Call, association: Association, world_size: int, block_size: int = 1) -> tuple[Schedule, ...]:
    """Every named schedule that implements the association for this call: what a tuner may choose from."""
    candidates = dict.fromkeys(
        [
            Oneshot(),
            direct(world_size),
            halving(world_size),
            hierarchical(world_size, block_size if block_size > 1 else 2),
            Binomial(),
            Ring(),
        ]
    )
    return tuple(schedule for schedule in candidates if _is_legal(schedule, call, association, world_size))


def _is_legal(schedule: Schedule, call: Call, association: Association, world_size: int) -> bool:
    try:
        schedule.check(call.collective, association, world_size)
    except ScheduleError:
        return False
    return True
