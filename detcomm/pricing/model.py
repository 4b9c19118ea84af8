# SPDX-License-Identifier: Apache-2.0
"""From loads to time. An alpha-beta model (Hockney 1994) with two links, a fold and pipelining.

    step        launch + latency of its farthest message + (messages - 1) * post
                + max(local bytes / local bandwidth, network bytes / network bandwidth) + folded bytes / fold bandwidth
    schedule    a call's own cost, and with the message cut in c pieces that follow each other through the steps:
                one piece through all steps, and c - 1 times the resource that is busiest with a piece
                (the links, the fold, or the launches of all steps)

The best c is taken. Contention in the network, ranks that come late and hosts that are busy are not in it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from detcomm.pricing.loads import Load, Message, all_reduce_loads
from detcomm.pricing.machines import Machine
from detcomm.schedule import Schedule
from detcomm.schedules import Binomial, Oneshot, Staged, direct, halving

_PIECES = (1, 2, 4, 8, 16, 32)

_US_PER_GB = 1e-3
"""Microseconds that a byte takes at one GB/s."""

_LOW_LATENCY_SHARE = 0.25
"""Of the bandwidth, in NCCL's low-latency protocol: half of its words are flags, and more is lost."""

_MOST_MESSAGES = 4096
"""Beyond this many messages a rank and step, a schedule is not considered."""


@dataclass(frozen=True)
class Price:
    """What one all-reduce is estimated to cost."""

    schedule: str
    time_us: float
    num_steps: int
    num_pieces: int
    local_bytes: float
    network_bytes: float


def price(
    schedule: Schedule, message: Message, world_size: int, machine: Machine, pieces: Sequence[int] = _PIECES
) -> Price:
    """The estimate for one schedule, with the best of these numbers of pieces."""
    loads = all_reduce_loads(schedule, message, world_size, machine.node_size)
    times = {number: _time_us(loads, number, machine) for number in pieces}
    best = min(times, key=times.__getitem__)
    return Price(
        schedule.text,
        times[best],
        len(loads),
        best,
        sum(load.local_bytes for load in loads),
        sum(load.network_bytes for load in loads),
    )


def ring_price(message: Message, world_size: int, machine: Machine) -> Price:
    """NCCL's ring, by NCCL's own formula: one ring a network port, so all ports of a host share the bytes.

    2 (N - M) local and 2 (M - 1) network latencies for M hosts; 2 (N-1)/N of the bytes at the bandwidth of the slower
    of a rank's local link and its host's ports together; in its bulk or its low-latency protocol, whichever is faster.
    It rounds 16-bit types at every hop, so partial sums are as small as leaves.
    """
    num_nodes = -(-world_size // machine.node_size)
    bandwidth = machine.local_gb_per_s
    if num_nodes > 1:
        bandwidth = min(bandwidth, machine.network_gb_per_s * machine.node_size)
    sent = 2 * (world_size - 1) / world_size * message.num_bytes
    num_local, num_network = 2 * (world_size - num_nodes), 2 * (num_nodes - 1)
    small_local, small_network, small_start = machine.small_latency_us
    times = (
        machine.launch_us
        + num_local * machine.local_latency_us
        + num_network * machine.network_latency_us
        + sent / bandwidth * _US_PER_GB,
        small_start
        + num_local * small_local
        + num_network * small_network
        + sent / (bandwidth * _LOW_LATENCY_SHARE) * _US_PER_GB,
    )
    network = sent / machine.node_size if num_nodes > 1 else 0.0
    return Price("ring", min(times), 2 * (world_size - 1), 1, sent, network)


def candidates(world_size: int, node_size: int) -> Iterator[Schedule]:
    """The schedules of ``tree`` that are worth a look: one radix inside hosts, another across them."""
    if world_size <= 64:
        yield Oneshot()
    yield Binomial()
    if world_size - 1 <= _MOST_MESSAGES:
        yield direct(world_size)
    yield halving(world_size)
    block = 1 << (node_size.bit_length() - 1)
    if node_size != block or not 1 < block < world_size:
        return
    num_blocks = -(-world_size // block)
    if num_blocks - 1 <= _MOST_MESSAGES:
        yield Staged((block, num_blocks))
    radix = 2
    while radix < num_blocks:
        radices, reached = [block], block
        while reached < world_size:
            radices.append(min(radix, -(-world_size // reached)))
            reached *= radices[-1]
        yield Staged(tuple(radices))
        radix *= 2


def _time_us(loads: list[Load], num_pieces: int, machine: Machine) -> float:
    first = sum(_step_us(load, num_pieces, machine) for load in loads)
    busiest = max(
        sum(load.local_bytes for load in loads) / machine.local_gb_per_s * _US_PER_GB / num_pieces,
        sum(load.network_bytes for load in loads) / machine.network_gb_per_s * _US_PER_GB / num_pieces,
        sum(load.folded_bytes for load in loads) / machine.fold_gb_per_s * _US_PER_GB / num_pieces,
        sum(machine.launch_us + max(load.num_messages - 1, 0) * machine.message_us for load in loads),
    )
    return machine.call_us + first + (num_pieces - 1) * busiest


def _step_us(load: Load, num_pieces: int, machine: Machine) -> float:
    latency = machine.network_latency_us if load.network_bytes else machine.local_latency_us
    local = load.local_bytes / machine.local_gb_per_s * _US_PER_GB
    network = load.network_bytes / machine.network_gb_per_s * _US_PER_GB
    fold = load.folded_bytes / machine.fold_gb_per_s * _US_PER_GB
    posting = max(load.num_messages - 1, 0) * machine.message_us
    return machine.launch_us + latency + posting + (max(local, network) + fold) / num_pieces
