# SPDX-License-Identifier: Apache-2.0
"""One collective and its memory on this rank, and whether they fit. Knows nothing of how it is run."""

from typing import NamedTuple, NoReturn

from detcomm.call import Call
from detcomm.collectives import ReduceOp
from detcomm.errors import UsageError
from detcomm.transports.base import Bytes

CACHED_CALLS = 1024


class Request(NamedTuple):
    """One collective and its memory on this rank.

    Attributes:
        call: what all ranks must agree on.
        input: ``call.input_count(rank)`` elements.
        output: ``call.output_count(rank)`` elements; may share memory with ``input`` in any way.
        factor: this rank's own factor, for PREMUL_SUM alone.
        label: the element type as the caller knows it, where it differs from ``call.dtype`` (``complex64``);
            agreed on too.
    """

    call: Call
    input: Bytes
    output: Bytes
    factor: float | None = None
    label: str = ""


class Requirement(NamedTuple):
    """What the memory and the factor of a call must be on this rank."""

    call: Call
    input_bytes: int
    output_bytes: int
    takes_factor: bool

    def refuse(self, request: Request) -> NoReturn:
        """Say what does not fit."""
        name = self.call.text()
        if request.input.size != self.input_bytes:
            raise UsageError(f"{name}: expected an input of {self.input_bytes} bytes, got {request.input.size}")
        if request.output.size != self.output_bytes:
            raise UsageError(f"{name}: expected an output of {self.output_bytes} bytes, got {request.output.size}")
        raise UsageError(f"{name}: expected {'a' if self.takes_factor else 'no'} factor, got {request.factor}")


class Requirements:
    """What calls require of their requests on one rank, remembered by call."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        # By identity, which spares hashing the call; an entry keeps its call alive, so the identity is its own.
        self._known: dict[int, Requirement] = {}

    def check(self, request: Request) -> None:
        """Refuse a request that does not fit its call, or its call the group.

        Raises:
            UsageError: with what was expected.
        """
        known = self._known.get(id(request.call)) or self.of(request.call)
        if (
            request.input.size != known.input_bytes
            or request.output.size != known.output_bytes
            or (request.factor is not None) != known.takes_factor
        ):
            known.refuse(request)

    def of(self, call: Call) -> Requirement:
        """What this call requires.

        Raises:
            UsageError: the call does not fit the group.
        """
        if call.shard_counts is not None and len(call.shard_counts) != self._world_size:
            raise UsageError(f"{call.text()}: expected {self._world_size} shards, got {len(call.shard_counts)}")
        if not 0 <= call.root < self._world_size:
            raise UsageError(f"{call.text()}: expected a root below {self._world_size}, got {call.root}")
        if len(self._known) >= CACHED_CALLS:
            self._known.clear()
        size = call.dtype.itemsize
        requirement = Requirement(
            call,
            call.input_count(self._rank) * size,
            call.output_count(self._rank) * size,
            call.op is ReduceOp.PREMUL_SUM,
        )
        self._known[id(call)] = requirement
        return requirement
