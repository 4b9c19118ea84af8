# SPDX-License-Identifier: Apache-2.0
"""Where a call's input and output lie in memory, and whether a plan may work on them as they are.

Knows addresses, neither plans nor transports.
"""

from typing import NamedTuple

import numpy as np

from detcomm.call import Call
from detcomm.collectives import Collective
from detcomm.transports.base import Bytes


class DeviceMemory(NamedTuple):
    """A run of bytes on a GPU, where ``Bytes`` is one of the host."""

    start: int
    size: int


def may_run_in_place(call: Call, rank: int, input: Bytes, output: Bytes) -> bool:
    """Whether input and output are apart, or lie on each other element by element.

    A plan writes the result of an element only when nobody needs this rank's contribution to that element any more,
    so it is safe where each element has one place. Any other overlap would destroy contributions of other elements.
    """
    return not np.may_share_memory(input, output) or is_in_place(call, rank, address(input), address(output))


def device_may_run_in_place(call: Call, rank: int, input: DeviceMemory, output: DeviceMemory) -> bool:
    """The same for memory of a GPU."""
    apart = input.start + input.size <= output.start or output.start + output.size <= input.start
    return apart or is_in_place(call, rank, input.start, output.start)


def is_in_place(call: Call, rank: int, input_start: int, output_start: int) -> bool:
    """Whether each element of the output lies on the same element of the input."""
    offset = output_start - input_start
    if call.collective is Collective.REDUCE_SCATTER:
        return offset == call.shard_starts[rank] * call.dtype.itemsize
    if call.collective is Collective.ALL_GATHER:
        return -offset == call.shard_starts[rank] * call.dtype.itemsize
    return offset == 0


def address(data: Bytes) -> int:
    """Of the first byte."""
    first: int = data.__array_interface__["data"][0]
    return first
