# SPDX-License-Identifier: Apache-2.0
"""What each step of an all-reduce asks of the busiest rank, by closed formulas that hold for any world size.

Counted per rank: bytes and messages that leave it (as many arrive), inside its host and over the network, and bytes
that its fold reads and writes. The formulas are those of full blocks; where the last block is ragged its ranks do
less. A test compares them with the plans that really run.
"""

from dataclasses import dataclass

from detcomm.collectives import Accumulate, DType, ReduceOp, partial_dtype
from detcomm.errors import UsageError
from detcomm.schedule import Schedule
from detcomm.schedules import Binomial, Oneshot, Ring, Staged


@dataclass(frozen=True)
class Load:
    """One step of one rank."""

    local_bytes: float = 0.0
    network_bytes: float = 0.0
    num_messages: int = 0
    folded_bytes: float = 0.0


@dataclass(frozen=True)
class Message:
    """What is reduced: bytes of the whole, and how much larger partial sums are."""

    num_bytes: float
    growth: float = 1.0

    @classmethod
    def of(cls, num_bytes: float, dtype: DType, accumulate: Accumulate, op: ReduceOp = ReduceOp.SUM) -> "Message":
        """A message of one type and precision."""
        return cls(num_bytes, partial_dtype(op, dtype, accumulate).itemsize / dtype.real.itemsize)


def all_reduce_loads(schedule: Schedule, message: Message, world_size: int, node_size: int) -> list[Load]:
    """The steps of an all-reduce, in order.

    Args:
        node_size: consecutive group ranks that share a host.

    Raises:
        UsageError: a schedule of a kind that has no formula.
    """
    if world_size == 1:
        return []
    if isinstance(schedule, Staged):
        return _staged(schedule, message, world_size, node_size)
    if isinstance(schedule, Ring):
        return _ring(message, world_size, node_size)
    if isinstance(schedule, Oneshot):
        return [_oneshot(message, world_size, node_size)]
    if isinstance(schedule, Binomial):
        return _binomial(message, world_size, node_size)
    raise UsageError(f"no cost formula for schedule {schedule.text}")


def _staged(schedule: Staged, message: Message, world_size: int, node_size: int) -> list[Load]:
    up: list[Load] = []
    down: list[Load] = []
    size = 1
    for radix in schedule.radices:
        if size >= world_size:
            break
        family = min(radix, -(-world_size // size))
        above = size * family
        # A rank holds its share of 1/size of the message, keeps one part in `family` of it and sends the others.
        held = message.num_bytes / size
        part = held / family
        is_leaf, is_last = size == 1, above >= world_size
        near = min(max(min(node_size, above) // size, 1), family) - 1 if size < node_size else 0
        far = family - 1 - near
        sent = part * (1.0 if is_leaf else message.growth)
        output = part * (1.0 if is_last else message.growth)
        up.append(Load(near * sent, far * sent, near + far, family * sent + output))
        down.append(Load(near * part, far * part, near + far))
        size = above
    return up + down[::-1]


def _ring(message: Message, world_size: int, node_size: int) -> list[Load]:
    shard = message.num_bytes / world_size
    crosses = world_size > node_size  # the last rank of a host sends everything over its own port

    def hop(sent: float, folded: float) -> Load:
        return Load(0.0 if crosses else sent, sent if crosses else 0.0, 1, folded)

    steps = [hop(shard, (2 * shard) + shard * message.growth)]
    for step in range(1, world_size - 1):
        is_last = step == world_size - 2
        partial = shard * message.growth
        steps.append(hop(partial, partial + shard + (shard if is_last else partial)))
    return steps + [hop(shard, 0.0)] * (world_size - 1)


def _oneshot(message: Message, world_size: int, node_size: int) -> Load:
    near = min(node_size, world_size) - 1
    far = world_size - 1 - near
    whole = message.num_bytes
    return Load(near * whole, far * whole, world_size - 1, (world_size + 1) * whole)


def _binomial(message: Message, world_size: int, node_size: int) -> list[Load]:
    """The whole message along one path; the sender of each step is its busiest rank."""
    up: list[Load] = []
    down: list[Load] = []
    distance = 1
    while distance < world_size:
        sent = message.num_bytes * (1.0 if distance == 1 else message.growth)
        is_last = distance * 2 >= world_size
        output = message.num_bytes * (1.0 if is_last else message.growth)
        near = distance < node_size
        up.append(Load(sent if near else 0.0, 0.0 if near else sent, 1, 2 * sent + output))
        whole = message.num_bytes
        down.append(Load(whole if near else 0.0, 0.0 if near else whole, 1))
        distance *= 2
    return up + down[::-1]
