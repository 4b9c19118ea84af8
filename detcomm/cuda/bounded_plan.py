# SPDX-License-Identifier: Apache-2.0
"""The plan of a call on a GPU: pieces short enough that its scratch stays within bounds, whatever the message size.

Speed only, and the same on all ranks.
"""

import math

from detcomm.call import Call
from detcomm.options import Options
from detcomm.plan import Plan
from detcomm.planner import PlanOptions, make_plan
from detcomm.tuning import CHUNK_BYTES

LAG = 2
"""A fold may run while the next exchange is under way."""

_LEAST_CHUNK_BYTES = 1 << 16


def bounded_plan(call: Call, rank: int, world_size: int, options: Options, block_size: int) -> Plan:
    """The plan of a call whose scratch stays within ``options.scratch_bytes``, as far as pieces can be made shorter.

    All ranks must cut alike, and need unlike scratch. So rank 0's need decides for all, with room for the others'.
    """
    limit = options.scratch_bytes // 2
    chunk_bytes = options.chunk_bytes or CHUNK_BYTES
    while True:
        plan_options = PlanOptions(options.order, options.accumulate, options.schedule, chunk_bytes, block_size, LAG)
        first = make_plan(call, 0, world_size, plan_options)
        if first.scratch_bytes <= limit or chunk_bytes <= _LEAST_CHUNK_BYTES:
            return first if rank == 0 else make_plan(call, rank, world_size, plan_options)
        shorter = math.floor(chunk_bytes * limit / first.scratch_bytes)
        chunk_bytes = max(min(shorter, chunk_bytes // 2), _LEAST_CHUNK_BYTES) // 512 * 512
