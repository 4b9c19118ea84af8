# SPDX-License-Identifier: Apache-2.0
"""Whether the memory of a request fits its call, looked up in little time: it is asked at every call."""

from typing import NamedTuple, NoReturn

from detcomm.call import Call
from detcomm.communicator import Request
from detcomm.errors import UsageError

_CACHED_CALLS = 1024


class _Expected(NamedTuple):
    """How much memory a call takes on this rank."""

    call: Call
    input_bytes: int
    output_bytes: int

    def refuse(self, request: Request) -> NoReturn:
        name = self.call.text()
        if request.input.size != self.input_bytes:
            raise UsageError(f"{name}: expected an input of {self.input_bytes} bytes, got {request.input.size}")
        raise UsageError(f"{name}: expected an output of {self.output_bytes} bytes, got {request.output.size}")


class Sizes:
    """What this rank's requests must be."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._expected: dict[int, _Expected] = {}

    def check(self, request: Request) -> None:
        """Refuse a request that does not fit.

        Raises:
            UsageError: wrong sizes, or a call for another number of ranks.
        """
        # By identity, which spares hashing the call; an entry keeps its call alive, so the identity is its own.
        known = self._expected.get(id(request.call)) or self._expect(request.call)
        if request.input.size != known.input_bytes or request.output.size != known.output_bytes:
            known.refuse(request)

    def _expect(self, call: Call) -> _Expected:
        if call.shard_counts is not None and len(call.shard_counts) != self._world_size:
            raise UsageError(f"{call.text()}: expected {self._world_size} shards, got {len(call.shard_counts)}")
        if not 0 <= call.root < self._world_size:
            raise UsageError(f"{call.text()}: expected a root below {self._world_size}, got {call.root}")
        if len(self._expected) >= _CACHED_CALLS:
            self._expected.clear()
        size = call.dtype.itemsize
        expected = _Expected(call, call.input_count(self._rank) * size, call.output_count(self._rank) * size)
        self._expected[id(call)] = expected
        return expected
