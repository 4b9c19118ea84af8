# SPDX-License-Identifier: Apache-2.0
"""What a call needs each time it is made: its program, and how much memory it takes on this rank.

Found by the identity of the call, since hashing one takes longer than the rest of a look-up.
"""

import ctypes
from functools import lru_cache
from typing import NoReturn

from detcomm.call import Call
from detcomm.cuda.bounded_plan import bounded_plan
from detcomm.cuda.kernels import Kernels, copy_blocks
from detcomm.cuda.program import Compiler, Program, make_program
from detcomm.errors import UsageError
from detcomm.options import Options
from detcomm.request import Request

_CACHED_CALLS = 1024
_CACHED_PROGRAMS = 256
_ALIGNMENT_BYTES = 256


class Prepared:
    """One call on one rank.

    Attributes:
        program: ``None`` where there is nothing to exchange.
        address: of its structure, for native code.
        scratch_bytes: that its plan needs, rounded up.
    """

    __slots__ = ("address", "call", "input_bytes", "output_bytes", "program", "scratch_bytes")

    def __init__(self, call: Call, rank: int, program: Program | None) -> None:
        size = call.dtype.itemsize
        self.call = call
        self.input_bytes = call.input_count(rank) * size
        self.output_bytes = call.output_count(rank) * size
        self.program = program
        self.address = 0 if program is None else ctypes.addressof(program.structure)
        scratch_bytes = 0 if program is None else program.plan.scratch_bytes
        self.scratch_bytes = -(-scratch_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def refuse(self, request: Request) -> NoReturn:
        """Say which memory of a request does not fit."""
        name = self.call.text()
        if request.input.size != self.input_bytes:
            raise UsageError(f"{name}: expected an input of {self.input_bytes} bytes, got {request.input.size}")
        raise UsageError(f"{name}: expected an output of {self.output_bytes} bytes, got {request.output.size}")


class PreparedCalls:
    """The calls of one rank of a group.

    Args:
        block_size: ranks of one aligned block that share a host.
        kernels: compile and load what a program needs.
    """

    def __init__(self, rank: int, world_size: int, options: Options, block_size: int, kernels: Kernels) -> None:
        self._rank = rank
        self._world_size = world_size
        self._options = options
        self._block_size = block_size
        self._kernels = kernels
        self._programs = lru_cache(maxsize=_CACHED_PROGRAMS)(self._make_program)
        self._known: dict[int, Prepared] = {}

    def find(self, request: Request) -> Prepared | None:
        """What the request's call needs, if it was made before.

        Raises:
            UsageError: the request's memory does not fit.
        """
        # An entry keeps its call alive, so that its identity is nobody else's.
        prepared = self._known.get(id(request.call))
        if prepared is not None and (
            request.input.size != prepared.input_bytes or request.output.size != prepared.output_bytes
        ):
            prepared.refuse(request)
        return prepared

    def check(self, request: Request) -> None:
        """Refuse a request that does not fit, before anything is made for it.

        Raises:
            UsageError: wrong sizes, or a call for another number of ranks.
        """
        call = request.call
        if call.shard_counts is not None and len(call.shard_counts) != self._world_size:
            raise UsageError(f"{call.text()}: expected {self._world_size} shards, got {len(call.shard_counts)}")
        if not 0 <= call.root < self._world_size:
            raise UsageError(f"{call.text()}: expected a root below {self._world_size}, got {call.root}")
        expected = Prepared(call, self._rank, None)
        if request.input.size != expected.input_bytes or request.output.size != expected.output_bytes:
            expected.refuse(request)

    def make(self, call: Call) -> Prepared:
        """Prepare a call that ``check`` has let through."""
        if len(self._known) >= _CACHED_CALLS:
            self._known.clear()
        prepared = Prepared(call, self._rank, self._programs(call))
        self._known[id(call)] = prepared
        return prepared

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
        self._programs.cache_clear()

    def _make_program(self, call: Call) -> Program | None:
        if self._world_size == 1 or not call.count:
            return None
        kernels = self._kernels
        compiler = Compiler(kernels.fold, kernels.fold_blocks, kernels.copy, copy_blocks)
        return make_program(bounded_plan(call, self._rank, self._world_size, self._options, self._block_size), compiler)
