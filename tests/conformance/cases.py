# SPDX-License-Identifier: Apache-2.0
"""What the conformance suite goes through: ways to reduce, and calls.

A *way* is what a group is made with (association, accumulation, schedule, blocks, chunk); a *case* is one call of it.
Knows how to enumerate and nothing of running.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import get_args

from detcomm.association import Association
from detcomm.call import Call
from detcomm.collectives import Accumulate, Collective, DType, ReduceOp
from detcomm.errors import ScheduleError
from detcomm.options import Options
from detcomm.schedules import parse
from tests import inputs

WORLD_SIZES = (1, 2, 3, 4, 5, 7, 8)
RING_CHUNK_ELEMS = 120
"""Short: 1000 elements have chunks of all of 8 owners and a ragged last one."""

ASSOCIATIONS = ("tree", "linear", "ring")
SCHEDULES = ("oneshot", "direct", "halving", "hierarchical", "staged(2,4)", "staged(4,2)", "binomial", "ring")
REDUCTIONS = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE)
WIRE_DTYPES = ("bfloat16", "float16")
"""Types whose bits depend on the accumulation mode."""


@dataclass(frozen=True)
class Way:
    """What a group is made with."""

    association: str
    accumulate: Accumulate
    schedule: str
    block_size: int = 1
    chunk_bytes: int | None = None

    @property
    def options(self) -> Options:
        return Options(
            association=self.association,
            ring_chunk_elems=RING_CHUNK_ELEMS,
            accumulate=self.accumulate,
            schedule=self.schedule,
            chunk_bytes=self.chunk_bytes,
        )


@dataclass(frozen=True)
class Case:
    """One call, in elements of the type as the user sees it.

    Attributes:
        op: ``None`` for all-gather.
        count: elements of the whole message.
        in_place: output and input are the same memory, or the shard of it.
    """

    collective: Collective
    dtype: str
    op: str | None
    count: int
    in_place: bool = False

    def call(self, world_size: int) -> Call:
        """As detcomm is told of it: complex numbers are pairs of reals."""
        dtype = DType(self.dtype)
        sharded = self.collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        per_element = dtype.itemsize // dtype.real.itemsize
        return Call(
            self.collective,
            dtype.real,
            self.count * per_element,
            ReduceOp(self.op) if self.op else None,
            tuple(n * per_element for n in shards(self.count, world_size)) if sharded else None,
            self.count % world_size if self.collective is Collective.REDUCE else 0,
        )


def shards(count: int, world_size: int) -> tuple[int, ...]:
    """Shards as even as can be: equal ones where the ranks divide the message, empty ones where it is short."""
    return tuple(count * (rank + 1) // world_size - count * rank // world_size for rank in range(world_size))


def ways(world_size: int, *, chunks: Sequence[int | None]) -> Iterator[Way]:
    """All ways that are legal for this world size, ``auto`` included."""
    for association in ASSOCIATIONS:
        for schedule in ("auto", *SCHEDULES):
            for block_size in (2, 4) if schedule == "hierarchical" else (1,):
                if is_legal(association, schedule, world_size, block_size):
                    for accumulate, chunk in itertools.product(get_args(Accumulate), chunks):
                        yield Way(association, accumulate, schedule, block_size, chunk)


@cache
def is_legal(association: str, schedule: str, world_size: int, block_size: int = 1) -> bool:
    """Whether this schedule implements the association."""
    if schedule == "auto":
        return True
    if schedule == "hierarchical" and block_size >= world_size:
        return False
    try:
        parsed = parse(schedule, world_size, block_size)
        for collective in REDUCTIONS:
            parsed.check(collective, Association(association, RING_CHUNK_ELEMS), world_size)
    except ScheduleError:
        return False
    return True


def counts(world_size: int) -> tuple[int, ...]:
    """Sizes at which shards are empty, ragged, even, and long enough to be cut up."""
    return (0, 1, world_size - 1, world_size + 1, 1000)


def kinds(way: Way) -> Iterator[tuple[Collective, str, str | None]]:
    """Every legal collective, type and operation under one way.

    Types whose bits do not depend on the accumulation mode are left out under ``wire``.
    """
    wire = way.accumulate == "wire"
    for collective, dtype in itertools.product(REDUCTIONS, WIRE_DTYPES if wire else inputs.DTYPES):
        for op in inputs.legal_ops(dtype):
            yield collective, dtype, op
    if not wire:
        for dtype in ("uint8", "bfloat16", "float64"):
            yield Collective.ALL_GATHER, dtype, None


def product(way: Way, world_size: int) -> Iterator[Case]:
    """The full product of calls under one way: every kind, at every size, in place and not."""
    for count, in_place in itertools.product(counts(world_size), (False, True)):
        for kind in kinds(way):
            yield Case(*kind, count, in_place)


def rotated(way: Way, world_size: int, turn: int) -> Iterator[Case]:
    """Every kind once under one way; sizes and places take turns, so that a tenth of ``product`` is run.

    Over ten consecutive turns each kind meets each size, in place and not.
    """
    places = list(itertools.product(counts(world_size), (False, True)))
    for index, kind in enumerate(kinds(way)):
        yield Case(*kind, *places[(index + turn) % len(places)])
