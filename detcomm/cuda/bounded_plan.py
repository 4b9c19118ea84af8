# SPDX-License-Identifier: Apache-2.0
"""The plan of a call on a GPU: in which pieces, and what NCCL gathers; with its scratch within bounds.

Speed only, and the same on all ranks. With ``schedule="auto"`` gathers may be NCCL's; a schedule that is named runs as
it stands, by messages alone.
"""

from collections.abc import Callable, Iterable

from detcomm.call import Call
from detcomm.collectives import Collective
from detcomm.cuda.gathering import gathered_inputs, gathered_results, gathered_shards, has_even_shards
from detcomm.cuda.peer.layout import Layout
from detcomm.cuda.scratch import largest
from detcomm.errors import UsageError
from detcomm.options import Options
from detcomm.plan import Plan
from detcomm.planner import PlanOptions, make_plan, resolve_schedule
from detcomm.schedules import Oneshot, direct

LAG = 2
"""A fold may run while the next exchange is under way."""

PIECE_BYTES = 8 << 20
"""Of a pipelined message whose ranks share a host: a fold takes a good part of the time of an exchange there."""

PIECE_BYTES_ACROSS = 64 << 20
"""The same across hosts: a fold takes a hundredth of an exchange, and each exchange begins with a pause."""

GATHER_BYTES = 16 << 20
"""From here on the results of an all-reduce across hosts come back through ncclAllGather."""

GATHER_INPUT_BYTES = 8 << 10
"""Up to here the inputs of an all-reduce across hosts go to everybody through ncclAllGather."""

_LEAST_PIECE_BYTES = 1 << 16
_ALIGN_BYTES = 512
_ONE_PIECE = 1 << 62


def bounded_plan(call: Call, rank: int, world_size: int, options: Options, block_size: int) -> Plan:
    """The plan of a call whose scratch stays within ``options.scratch_bytes``, as far as pieces can be made shorter.

    All ranks must cut alike, and need unlike scratch. So rank 0's need decides for all, with room for the others'.

    Args:
        block_size: ranks of one aligned block that share a host.
    """
    make = _planner(call, world_size, options, block_size, False)
    first, piece_bytes, _ = _cut(call, make, options, block_size < world_size, options.scratch_bytes, _scratch_bytes)
    return first if rank == 0 else make(rank, piece_bytes)


def bounded_peer_plans(
    call: Call, ranks: Iterable[int], world_size: int, options: Options, block_size: int, staging_bytes: int
) -> dict[int, Plan]:
    """The same where the ranks of a block read each other's memory, for several ranks: what they stage is bounded.

    Rank 1's need counts, too, since a root may have nothing to stage where all others have.

    Args:
        staging_bytes: of the memory that the ranks of a block have mapped.

    Raises:
        UsageError: it is too small for any pieces; on all ranks alike.
    """

    def need(first: Plan, piece_bytes: int) -> int:
        block = range(min(block_size, world_size))
        plans = [first, *(make(other, piece_bytes) for other in block[1:2])]
        return max(Layout(plan, {*block} - {plan.rank}).num_bytes for plan in plans)

    make = _planner(call, world_size, options, block_size, True)
    first, piece_bytes, num_bytes = _cut(call, make, options, block_size < world_size, staging_bytes, need)
    if num_bytes > largest(staging_bytes):
        raise UsageError(
            f"{call.text()}, {first.schedule}: a rank stages {num_bytes} bytes for its peers in the shortest pieces; "
            f"expected at most {largest(staging_bytes)}: raise scratch_bytes, or choose another schedule"
        )
    return {rank: first if rank == 0 else make(rank, piece_bytes) for rank in ranks}


def _scratch_bytes(plan: Plan, piece_bytes: int) -> int:
    return plan.scratch_bytes


def _cut(
    call: Call,
    make: Callable[[int, int], Plan],
    options: Options,
    crosses_hosts: bool,
    bound_bytes: int,
    need: Callable[[Plan, int], int],
) -> tuple[Plan, int, int]:
    """Rank 0's plan, the length of pieces with which no more than a bound is needed, or the shortest; and the need."""
    limit = largest(bound_bytes)
    message_bytes = call.count * call.dtype.itemsize
    usual = PIECE_BYTES_ACROSS if crosses_hosts else PIECE_BYTES
    piece_bytes = options.chunk_bytes or _part(message_bytes, -(-message_bytes // usual))
    while True:
        first = make(0, piece_bytes)
        num_bytes = need(first, piece_bytes)
        if num_bytes <= limit or piece_bytes <= _LEAST_PIECE_BYTES:
            return first, piece_bytes, num_bytes
        num_pieces = -(-message_bytes // piece_bytes)
        enough = -(-num_pieces * num_bytes // limit)
        piece_bytes = max(_part(message_bytes, max(enough, num_pieces + 1)), _LEAST_PIECE_BYTES)


def _part(message_bytes: int, num_pieces: int) -> int:
    """Pieces of about the same length."""
    num_bytes = -(-message_bytes // max(num_pieces, 1))
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _planner(
    call: Call, world_size: int, options: Options, block_size: int, by_peers: bool
) -> Callable[[int, int], Plan]:
    """Makes a rank's plan with pieces of so many bytes."""

    def plan_of(part: Call, rank: int, schedule: str, piece_bytes: int | None = None) -> Plan:
        """Without a length of pieces in one piece."""
        lag = 1 if piece_bytes is None else LAG
        plan_options = PlanOptions(
            options.order, options.accumulate, schedule, piece_bytes or _ONE_PIECE, block_size, lag
        )
        return make_plan(part, rank, world_size, plan_options)

    def with_gathered_results(rank: int, piece_bytes: int) -> Plan:
        piece_elems = piece_bytes // call.dtype.itemsize
        return gathered_results(call, piece_elems, world_size, lambda part, schedule: plan_of(part, rank, schedule))

    if options.schedule != "auto" or (by_peers and block_size >= world_size):
        return lambda rank, piece_bytes: plan_of(call, rank, options.schedule, piece_bytes)
    if has_even_shards(call):
        return lambda rank, piece_bytes: gathered_shards(plan_of(call, rank, "direct"))
    plan_options = PlanOptions(options.order, options.accumulate, "auto", None, block_size, LAG)
    schedule = resolve_schedule(call, world_size, plan_options)
    crosses_hosts = block_size < world_size
    is_long = call.count * call.dtype.itemsize >= GATHER_BYTES
    is_direct = schedule == direct(world_size) and options.association != "ring"
    if call.collective is Collective.ALL_REDUCE and crosses_hosts and is_long and is_direct:
        return with_gathered_results
    is_short = call.count * call.dtype.itemsize <= GATHER_INPUT_BYTES
    if call.collective is Collective.ALL_REDUCE and crosses_hosts and is_short and schedule == Oneshot():
        return lambda rank, piece_bytes: gathered_inputs(plan_of(call, rank, "oneshot"))
    return lambda rank, piece_bytes: plan_of(call, rank, "auto", piece_bytes)
