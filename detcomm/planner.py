# SPDX-License-Identifier: Apache-2.0
"""From a call to a plan: resolve the schedule, check it against the association, lower it to one rank.

A pure function: equal arguments give equal plans, and what differs between ranks is the rank alone.
"""

import hashlib
from dataclasses import dataclass

from detcomm.association import TREE, Association
from detcomm.call import Call
from detcomm.collectives import Accumulate
from detcomm.lower import Lowering
from detcomm.partition import partition
from detcomm.plan import Plan
from detcomm.schedule import Schedule
from detcomm.schedules import parse
from detcomm.tuning import CHUNK_BYTES, choose_schedule


@dataclass(frozen=True)
class PlanOptions:
    """What of a group's options a plan depends on.

    Args:
        schedule: a schedule's text, or ``auto``.
        chunk_bytes: bytes of one pipelined piece of the whole message; ``None`` leaves it to tuning.
        block_size: ranks of one aligned block that share a host.
        lag: plan steps between a piece's schedule steps: 1, or 2 where a fold may overlap the next exchange.
    """

    association: Association = TREE
    accumulate: Accumulate = "float32"
    schedule: str = "auto"
    chunk_bytes: int | None = None
    block_size: int = 1
    lag: int = 1


def resolve_schedule(call: Call, world_size: int, options: PlanOptions) -> Schedule:
    """The schedule that runs.

    Raises:
        UsageError: if the options name no schedule.
        ScheduleError: if it does not implement the association for this call.
    """
    if options.schedule == "auto":
        schedule = choose_schedule(call, options.association, world_size, options.block_size)
    else:
        schedule = parse(options.schedule, world_size, options.block_size)
    schedule.check(call.collective, options.association, world_size)
    return schedule


def make_plan(call: Call, rank: int, world_size: int, options: PlanOptions) -> Plan:
    """The plan of one rank for one call.

    Raises:
        UsageError: if the options name no schedule.
        ScheduleError: if the schedule does not implement the association.
    """
    schedule = resolve_schedule(call, world_size, options)
    numerics_id = options.association.numerics_id(options.accumulate)
    num_shares = len(partition(call, options.association, schedule, world_size))
    chunk_bytes = options.chunk_bytes or CHUNK_BYTES
    piece_elems = max(chunk_bytes // call.dtype.itemsize // max(num_shares, 1), 1)
    if options.association.name == "ring" and call.shard_counts is None:
        piece_elems = _whole_ring_chunks(piece_elems, options.association.ring_chunk_elems)
    lowering = Lowering(
        schedule,
        call,
        options.association,
        options.accumulate,
        rank,
        world_size,
        piece_elems,
        options.lag,
    )
    steps, scratch_bytes = lowering.steps()
    told = f"{call}|{numerics_id}|{schedule.text}|{world_size}|{piece_elems}|{options.lag}"
    return Plan(
        call=call,
        rank=rank,
        world_size=world_size,
        numerics_id=numerics_id,
        accumulate=options.accumulate,
        schedule=schedule.text,
        schedule_fingerprint=hashlib.blake2b(told.encode(), digest_size=16).hexdigest(),
        scratch_bytes=scratch_bytes,
        steps=steps,
    )


def _whole_ring_chunks(piece_elems: int, ring_chunk_elems: int) -> int:
    """Cut pieces at the borders of the fixed chunks, so that a piece is one run of bytes and needs no packing."""
    if piece_elems >= ring_chunk_elems:
        # Long chunks make good pieces; short ones are packed together.
        return ring_chunk_elems if ring_chunk_elems >= 1 << 14 else piece_elems
    parts = -(-ring_chunk_elems // piece_elems)
    while ring_chunk_elems % parts and ring_chunk_elems // parts > piece_elems // 2:
        parts += 1
    if ring_chunk_elems % parts:
        return piece_elems  # a prime, say, has no such part: to pack costs less than pieces of one element
    return ring_chunk_elems // parts
