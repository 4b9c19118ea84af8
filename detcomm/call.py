# SPDX-License-Identifier: Apache-2.0
"""One collective call as a value: everything about it that all ranks must agree on."""

from dataclasses import dataclass
from itertools import accumulate

from detcomm.collectives import Collective, DType, ReduceOp, check_legal
from detcomm.errors import UsageError


@dataclass(frozen=True)
class Call:
    """What is reduced or gathered, in elements.

    Args:
        collective: which collective.
        dtype: element type. Complex messages are described by their reals (``DType.real``, twice the count).
            An all-gather moves bytes and may describe any type as ``UINT8``.
        count: elements of the whole message: of the tensor for all-reduce and reduce, of the input of
            reduce-scatter, of the output of all-gather.
        op: the operation; ``None`` for all-gather. ``PREMUL_SUM`` is a SUM whose senders multiply first.
        shard_counts: elements of each rank's shard, for reduce-scatter and all-gather alone.
        root: the receiving group rank of a reduce.
    """

    collective: Collective
    dtype: DType
    count: int
    op: ReduceOp | None = None
    shard_counts: tuple[int, ...] | None = None
    root: int = 0

    def __post_init__(self) -> None:
        name = self.collective.value
        if self.count < 0:
            raise UsageError(f"{name}: count must not be negative, got {self.count}")
        if self.collective.reduces != (self.op is not None):
            raise UsageError(f"{name}: {'an operation is required' if self.op is None else 'takes no operation'}")
        if self.op is not None:
            check_legal(self.op, self.dtype)
            if self.dtype.kind == "complex":
                raise UsageError(f"{name}: describe complex messages by their reals, got {self.dtype.value}")
        sharded = self.collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        if sharded != (self.shard_counts is not None):
            raise UsageError(f"{name}: shard_counts are for reduce_scatter and all_gather, which require them")
        if self.shard_counts is not None and sum(self.shard_counts) != self.count:
            raise UsageError(f"{name}: shards of {self.shard_counts} elements do not add up to {self.count}")

    @property
    def shard_starts(self) -> tuple[int, ...]:
        """The first element of each rank's shard."""
        return tuple(accumulate((self.shard_counts or ())[:-1], initial=0))

    def input_count(self, rank: int) -> int:
        """Elements that this rank gives."""
        if self.collective is Collective.ALL_GATHER:
            assert self.shard_counts is not None
            return self.shard_counts[rank]
        return self.count

    def output_count(self, rank: int) -> int:
        """Elements that this rank receives; none on the other ranks of a reduce."""
        if self.collective is Collective.REDUCE_SCATTER:
            assert self.shard_counts is not None
            return self.shard_counts[rank]
        if self.collective is Collective.REDUCE and rank != self.root:
            return 0
        return self.count

    def text(self) -> str:
        """``all_reduce(sum, float32[1000])``, as error messages print it."""
        op = f"{self.op.value}, " if self.op else ""
        root = f", root {self.root}" if self.collective is Collective.REDUCE else ""
        return f"{self.collective.value}({op}{self.dtype.value}[{self.count}]{root})"


def even_shards(count: int, world_size: int) -> tuple[int, ...]:
    """Equal shards of a message.

    Raises:
        UsageError: if ``count`` is not divisible by ``world_size``.
    """
    if count % world_size:
        raise UsageError(f"{count} elements do not divide evenly over {world_size} ranks")
    return (count // world_size,) * world_size
