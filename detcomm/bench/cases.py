# SPDX-License-Identifier: Apache-2.0
"""What is measured: one collective on one type, operation and size; who gives and receives how much of it.

Sizes, counts and bandwidths are those of nccl-tests: of the whole message, which is the tensor of an all-reduce or
reduce, the input of a reduce-scatter, the output of an all-gather.
"""

import enum
from dataclasses import dataclass

from detcomm.call import Call, even_shards
from detcomm.collectives import Collective, DType, ReduceOp


class Place(enum.Enum):
    """Where the result goes, as nccl-tests tell them apart.

    ``OUT``: into memory of its own. ``IN``: over the input; of a reduce-scatter over this rank's shard of it, of an
    all-gather the input is this rank's shard of the output.
    """

    OUT = "out_of_place"
    IN = "in_place"


@dataclass(frozen=True)
class Case:
    """One row of a benchmark.

    Args:
        num_bytes: of the whole message. Rounded down to whole elements, of reduce-scatter and all-gather to as many
            on each rank.
        op: of the collectives that reduce.
        root: receiver of a reduce.
    """

    collective: Collective
    dtype: DType
    num_bytes: int
    op: ReduceOp = ReduceOp.SUM
    root: int = 0

    @property
    def sharded(self) -> bool:
        """Whether each rank has a part of the message on one side."""
        return self.collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)

    def count(self, world_size: int) -> int:
        """Elements of the whole message."""
        count = self.num_bytes // self.dtype.itemsize
        return count // world_size * world_size if self.sharded else count

    def call(self, world_size: int) -> Call:
        """The collective as detcomm's core takes it."""
        count = self.count(world_size)
        op = self.op if self.collective.reduces else None
        return Call(
            self.collective,
            self.dtype.real,
            count * (self.dtype.itemsize // self.dtype.real.itemsize),
            op,
            even_shards(count, world_size) if self.sharded else None,
            self.root,
        )

    def bus_factor(self, world_size: int) -> float:
        """``busbw / algbw``, as nccl-tests define it."""
        share = (world_size - 1) / world_size
        if self.collective is Collective.REDUCE:
            return 1.0
        return 2 * share if self.collective is Collective.ALL_REDUCE else share

    @property
    def usual_place(self) -> Place:
        """How training calls it, and torch offers it: an all-reduce over its input, the others into other memory."""
        return Place.OUT if self.sharded else Place.IN

    def given(self, world_size: int) -> int:
        """Elements that each rank gives."""
        count = self.count(world_size)
        return count // world_size if self.collective is Collective.ALL_GATHER else count

    def received(self, world_size: int) -> int:
        """Elements that a rank receives; of a reduce, its root."""
        count = self.count(world_size)
        return count // world_size if self.collective is Collective.REDUCE_SCATTER else count

    def receives(self, rank: int) -> bool:
        """Whether ``rank`` has a result."""
        return self.collective is not Collective.REDUCE or rank == self.root
