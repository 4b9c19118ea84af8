# SPDX-License-Identifier: Apache-2.0
"""What is measured: one collective on one type and size, its input and the only right output."""

from dataclasses import dataclass

import numpy as np

from detcomm.call import Call, even_shards
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.transports.base import Bytes

_VALUES = 7
"""Inputs are small whole numbers, whose sums are exact in every type and so right in any order of additions."""


@dataclass(frozen=True)
class Case:
    """One line of a benchmark.

    Args:
        num_bytes: of the whole message, as nccl-tests count: of the tensor of an all-reduce, the input of a
            reduce-scatter, the output of an all-gather. Rounded down to what divides evenly.
    """

    collective: Collective
    dtype: DType
    num_bytes: int

    def count(self, world_size: int) -> int:
        """Elements of the whole message."""
        return self.num_bytes // self.dtype.itemsize // world_size * world_size

    def call(self, world_size: int) -> Call:
        """The collective as detcomm's core takes it."""
        count = self.count(world_size)
        sharded = self.collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        return Call(
            self.collective,
            self.dtype,
            count,
            ReduceOp.SUM if self.collective.reduces else None,
            even_shards(count, world_size) if sharded else None,
        )

    def bus_factor(self, world_size: int) -> float:
        """``busbw / algbw``, as nccl-tests define it."""
        share = (world_size - 1) / world_size
        if self.collective is Collective.REDUCE:
            return 1.0
        return 2 * share if self.collective is Collective.ALL_REDUCE else share

    def input(self, rank: int, world_size: int) -> Bytes:
        """This rank's contribution, in pages of its own."""
        return _encode(self.dtype, _numbers(self.call(world_size).input_count(rank), rank))

    def expected(self, rank: int, world_size: int) -> Bytes:
        """What this rank must receive."""
        call = self.call(world_size)
        if self.collective is Collective.ALL_GATHER:
            parts = [_numbers(call.input_count(peer), peer) for peer in range(world_size)]
            return _encode(self.dtype, np.concatenate(parts))
        total = np.zeros(call.count, np.float32)
        for peer in range(world_size):
            total += _numbers(call.count, peer)
        start = call.shard_starts[rank] if call.shard_counts else 0
        return _encode(self.dtype, total[start : start + call.output_count(rank)])


def _numbers(count: int, rank: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    period = (np.arange(_VALUES * 64) * 5 + rank * 3) % _VALUES
    return np.resize(period.astype(np.float32), count)


def _encode(dtype: DType, numbers: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> Bytes:
    if dtype is DType.BFLOAT16:
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)  # exact: small whole numbers
    return numbers.astype(dtype.value).view(np.uint8)
