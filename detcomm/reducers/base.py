# SPDX-License-Identifier: Apache-2.0
"""The seam between the tools and the library that they examine. Knows neither torch nor MPI.

An ``Examined`` library opens ``Reducer``s, groups of ranks one after the other: the order of the ranks, and detcomm's
options, can be other ones each time.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.options import Options
from detcomm.transports.base import Bytes

PATIENCE_S = 300.0
"""How long any single call may take, on a machine that has much else to do."""


class Reducer(ABC):
    """One group's reductions. All its ranks make the same calls."""

    rank: int
    world_size: int

    @abstractmethod
    def reduce(
        self,
        collective: Collective,
        op: ReduceOp,
        dtype: DType,
        input: Bytes,
        *,
        root: int = 0,
        factor: float | None = None,
    ) -> Bytes:
        """Do one reduction and return what this rank receives; nothing on the other ranks of a reduce.

        Args:
            input: this rank's contribution; not changed. A reduce-scatter's is divisible by the world size.
            factor: of this rank, for ``PREMUL_SUM``.
        """

    @abstractmethod
    def all_gather(self, input: Bytes) -> Bytes:
        """The inputs of all ranks, one after the other."""

    @abstractmethod
    def broadcast(self, data: Bytes, root: int) -> Bytes:
        """The root's bytes, on every rank; the others give as many."""


class Examined(ABC):
    """A library under examination, seen from one of the ranks that examine it together."""

    name: str
    device: str
    rank: int
    world_size: int
    num_groups: int = 0
    """Groups opened so far, alike on all ranks, those outside of a group included."""

    @abstractmethod
    def refusal(self, op: ReduceOp, dtype: DType) -> str | None:
        """Why the library cannot be asked for this, or ``None`` if it can."""

    @abstractmethod
    def tell(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, not by way of what is examined."""

    @abstractmethod
    def _open(self, order: Sequence[int], options: Options | None) -> Reducer:
        """Make a group; called by its members alone."""

    @abstractmethod
    def _close(self) -> None:
        """Undo the last ``_open``."""

    @abstractmethod
    def close(self) -> None:
        """The examination is over."""

    @contextmanager
    def opened(self, order: Sequence[int] | None = None, options: Options | None = None) -> Iterator[Reducer | None]:
        """A group, for a while; ``None`` on ranks outside. All ranks of the examination enter, and leave together.

        Args:
            order: the members; ``order[r]`` is the process with group rank ``r``. Default: all, in order.
            options: for detcomm alone.
        """
        members = range(self.world_size) if order is None else order
        self.num_groups += 1
        if self.rank in members:
            reducer = self._open(members, options)
            yield reducer
            self._close()
        else:
            yield None
        self.tell(None)  # nobody makes the next group while others still use this one


def spoken(examined: Examined, value: Any) -> Any:
    """Rank 0's value, on every rank."""
    return examined.tell(value if examined.rank == 0 else None)[0]
