# SPDX-License-Identifier: Apache-2.0
"""A pairwise covering of the conformance product: any two values of two factors meet in some call."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from detcomm.collectives import Accumulate
from tests import inputs
from tests.conformance.cases import ASSOCIATIONS, REDUCTIONS, SCHEDULES, Case, Way, is_legal
from tests.conformance.covering import covering

OPS = ("sum", "avg", "premul_sum", "product", "min", "max", "band", "bor", "bxor")
ACCUMULATE: tuple[Accumulate, ...] = ("float32", "wire")
BLOCK_SIZE = 2
_COUNT, _ROUTE, _DTYPE, _OP, _WORLD, _COLLECTIVE, _ACCUMULATE, _CHUNK, _PLACE = range(9)


@dataclass(frozen=True)
class Sample:
    """The factors that a test chooses; cheap values first.

    Attributes:
        counts: elements; complex numbers count twice.
        chunk_bytes: sizes of pipelined pieces.
    """

    counts: Sequence[int]
    world_sizes: Sequence[int]
    chunk_bytes: Sequence[int | None]

    @cached_property
    def routes(self) -> list[tuple[str, str]]:
        """Association and schedule, where some world size allows them."""
        return [
            (association, schedule)
            for association, schedule in itertools.product(ASSOCIATIONS, ("auto", *SCHEDULES))
            if any(is_legal(association, schedule, world_size, BLOCK_SIZE) for world_size in self.world_sizes)
        ]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many values each factor has."""
        num_routes, num_dtypes, num_worlds = len(self.routes), len(inputs.DTYPES), len(self.world_sizes)
        own = (len(self.counts), num_routes, num_dtypes, len(OPS), num_worlds)
        return (*own, len(REDUCTIONS), len(ACCUMULATE), len(self.chunk_bytes), 2)

    def is_legal(self, factor: int, value: int, other: int, other_value: int) -> bool:
        """Whether two values may meet; factors in ascending order."""
        if (factor, other) == (_DTYPE, _OP):
            return OPS[other_value] in inputs.legal_ops(inputs.DTYPES[value])
        if (factor, other) == (_ROUTE, _WORLD):
            return is_legal(*self.routes[value], self.world_sizes[other_value], BLOCK_SIZE)
        return True

    def rows(self) -> list[tuple[int, ...]]:
        """The covering, as numbers of values."""
        return covering(self.sizes, self.is_legal)

    def calls(self) -> list[tuple[int, Way, Case]]:
        """The covering, as (world size, way, case)."""
        return [self._call(row) for row in self.rows()]

    def _call(self, row: tuple[int, ...]) -> tuple[int, Way, Case]:
        association, schedule = self.routes[row[_ROUTE]]
        chunk = self.chunk_bytes[row[_CHUNK]]
        dtype, count = inputs.DTYPES[row[_DTYPE]], self.counts[row[_COUNT]]
        elements = -(-count // 2) if dtype in inputs.COMPLEX else count
        return (
            self.world_sizes[row[_WORLD]],
            Way(association, ACCUMULATE[row[_ACCUMULATE]], schedule, BLOCK_SIZE, chunk),
            Case(REDUCTIONS[row[_COLLECTIVE]], dtype, OPS[row[_OP]], elements, bool(row[_PLACE])),
        )
