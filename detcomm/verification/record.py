# SPDX-License-Identifier: Apache-2.0
"""What was checked and what failed: on one rank while it goes on, and over all ranks in the end."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from detcomm.collectives import DType, ReduceOp
from detcomm.reducers import Examined
from detcomm.transports.base import Bytes
from detcomm.verification.contract import Guarantee

Row = tuple[str, Guarantee, DType]
"""A cell of the table: contract, guarantee and type."""


@dataclass(frozen=True)
class Failure:
    """The first element of one reduction whose bits are not those expected."""

    contract: str
    guarantee: str
    dtype: str
    op: str
    how: str
    rank: int
    element: int
    expected: str
    got: str

    def __str__(self) -> str:
        return (
            f"{self.contract} {self.guarantee}: {self.op} {self.dtype}, {self.how}: rank {self.rank}, "
            f"element {self.element}: expected {self.expected}, got {self.got}"
        )


@dataclass
class Records:
    """What one rank has seen."""

    rank: int
    num_checks: Counter[Row] = field(default_factory=Counter)
    failures: list[tuple[Row, Failure]] = field(default_factory=list)
    partly: set[Row] = field(default_factory=set)
    digests: dict[str, str] = field(default_factory=dict)

    def compare(
        self, row: Row, op: ReduceOp, how: str, result: Bytes, expected: Bytes, *, first: int = 0, partly: bool = False
    ) -> None:
        """Compare two results bit by bit.

        Args:
            how: what was varied, for people.
            first: the element of the message at which the result begins.
            partly: whether the contract promises this for some messages alone.
        """
        self.num_checks[row] += 1
        if partly:
            self.partly.add(row)
        if np.array_equal(result, expected):
            return
        contract, guarantee, dtype = row
        element, expected_hex, got_hex = _first_difference(result, expected, dtype.itemsize)
        failure = Failure(
            contract,
            guarantee.value,
            dtype.value,
            op.value,
            how,
            self.rank,
            first + element,
            expected_hex,
            got_hex,
        )
        self.failures.append((row, failure))

    def fail(self, row: Row, op: ReduceOp, how: str) -> None:
        """Note a failure that is no difference of bits."""
        contract, guarantee, dtype = row
        self.num_checks[row] += 1
        failure = Failure(contract, guarantee.value, dtype.value, op.value, how, self.rank, 0, "", "")
        self.failures.append((row, failure))


@dataclass(frozen=True)
class Verdict:
    """What all ranks have seen.

    Attributes:
        num_checks: comparisons on rank 0, by cell.
        num_failures: comparisons that failed on any rank, by cell.
        failures: of each cell the first few.
        digests: of the golden reductions by numerics id: what was computed here, and what it must be everywhere.
    """

    world_size: int
    num_checks: dict[Row, int]
    num_failures: dict[Row, int]
    partly: frozenset[Row]
    failures: tuple[Failure, ...]
    digests: dict[str, tuple[str, str]]

    @property
    def holds(self) -> bool:
        """Whether every check of every guarantee succeeded."""
        return not self.num_failures and all(got == expected for got, expected in self.digests.values())

    def rows(self) -> Iterator[tuple[str, Guarantee]]:
        """Contract and guarantee of each line of the table, in the order in which they were checked."""
        contracts = dict.fromkeys(contract for contract, _, _ in self.num_checks)
        for contract in contracts:
            checked = {guarantee for own, guarantee, _ in self.num_checks if own == contract}
            for guarantee in Guarantee:
                if guarantee in checked:
                    yield contract, guarantee

    def dtypes(self) -> tuple[DType, ...]:
        """The columns of the table."""
        checked = {dtype for _, _, dtype in self.num_checks}
        return tuple(dtype for dtype in DType if dtype in checked)

    def to_json(self) -> dict[str, Any]:
        """All of it, for other programs."""
        return {
            "holds": self.holds,
            "world_size": self.world_size,
            "checks": [
                {
                    "contract": contract,
                    "guarantee": guarantee.value,
                    "dtype": dtype.value,
                    "checks": number,
                    "failures": self.num_failures.get((contract, guarantee, dtype), 0),
                    "partly_promised": (contract, guarantee, dtype) in self.partly,
                }
                for (contract, guarantee, dtype), number in self.num_checks.items()
            ],
            "failures": [asdict(failure) for failure in self.failures],
            "digests": {name: {"got": got, "expected": expected} for name, (got, expected) in self.digests.items()},
        }


FAILURES_KEPT = 3
"""Failures kept of each cell."""


def merge(examined: Examined, own: Records, expected_digests: dict[str, str]) -> Verdict:
    """The verdict, alike on every rank."""
    told: list[Records] = examined.tell(own)
    num_failures: Counter[Row] = Counter()
    kept: list[Failure] = []
    for row, failure in (pair for records in told for pair in records.failures):
        num_failures[row] += 1
        if num_failures[row] <= FAILURES_KEPT:
            kept.append(failure)
    return Verdict(
        world_size=len(told),
        num_checks=dict(told[0].num_checks),
        num_failures=dict(num_failures),
        partly=frozenset(told[0].partly),
        failures=tuple(kept),
        digests={name: (told[0].digests[name], digest) for name, digest in expected_digests.items()},
    )


def digest_of(results: Iterable[Bytes]) -> str:
    """128 bits over results, in hexadecimal."""
    digest = hashlib.blake2b(digest_size=16)
    for result in results:
        digest.update(result.tobytes())
    return digest.hexdigest()


def _first_difference(result: Bytes, expected: Bytes, itemsize: int) -> tuple[int, str, str]:
    if result.size != expected.size:
        return 0, f"{expected.size} bytes", f"{result.size} bytes"
    element = int(np.flatnonzero(result != expected)[0]) // itemsize
    part = slice(element * itemsize, (element + 1) * itemsize)
    return element, _hex(expected[part]), _hex(result[part])


def _hex(element: Bytes) -> str:
    return "0x" + element[::-1].tobytes().hex()  # little-endian memory, most significant digit first
