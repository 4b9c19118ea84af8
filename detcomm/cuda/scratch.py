# SPDX-License-Identifier: Apache-2.0
"""A group's scratch on a GPU: memory that stays from call to call, in two sizes that together keep within a bound.

What has been outgrown may still be in use by earlier calls. So the sizes add up to the bound: even while both are
alive, it holds. Knows torch only through the function that allocates.
"""

from collections.abc import Callable
from typing import Any, Protocol

_SIXTEENTHS = (2, 14)


class Block(Protocol):
    """Device memory while somebody holds it: a tensor."""

    def data_ptr(self) -> int: ...


def largest(bound_bytes: int) -> int:
    """The most that one call may need if the bound is to hold."""
    return bound_bytes // 16 * _SIXTEENTHS[-1]


class Scratch:
    """Scratch of one group on one device. Calls that use it follow each other in order.

    Args:
        bound_bytes: kept as long as no call needs more than ``largest``.
        allocate: gives device memory.
    """

    def __init__(self, bound_bytes: int, allocate: Callable[[int], Block]) -> None:
        self._sizes = [bound_bytes // 16 * part for part in _SIXTEENTHS]
        self._allocate = allocate
        self._block: Block | None = None
        self._start = 0
        self._num_bytes = 0
        self._outgrown: list[Any] = []

    def take(self, num_bytes: int) -> int:
        """The address of at least so much."""
        if self._num_bytes < num_bytes:
            self._grow(num_bytes)
        return self._start

    def take_for(self, num_bytes: int, capturing: bool, kept: list[Any]) -> int:
        """The same; but a graph that is captured has its own, in ``kept``, since it may run beside everything."""
        if not num_bytes:
            return 0
        if not capturing:
            return self.take(num_bytes)
        own = self._allocate(num_bytes)
        kept.append(own)
        return own.data_ptr()

    def outgrown(self) -> list[Any]:
        """What is no longer needed when the calls issued so far are done. Told once."""
        if not self._outgrown:
            return self._outgrown
        outgrown, self._outgrown = self._outgrown, []
        return outgrown

    def release(self) -> None:
        """The GPU is done with it."""
        self._block, self._num_bytes, self._outgrown = None, 0, []

    def _grow(self, num_bytes: int) -> None:
        if self._block is not None:
            self._outgrown.append(self._block)
        self._num_bytes = next((size for size in self._sizes if size >= num_bytes), num_bytes)
        self._block = self._allocate(self._num_bytes)
        self._start = self._block.data_ptr()
