# SPDX-License-Identifier: Apache-2.0
"""What a call needs each time it is made: its program, and how much memory it takes on this rank.

Found by the identity of the call, since hashing one takes longer than the rest of a look-up.
"""

from functools import lru_cache
from typing import NoReturn

from detcomm.call import Call
from detcomm.cuda.bounded_plan import bounded_peer_plans, bounded_plan
from detcomm.cuda.kernels import Kernels, copy_blocks, peer_copy_blocks
from detcomm.cuda.libraries import relaxed_capture
from detcomm.cuda.peer.fused import FUSED_BYTES, SLICE_BYTES, blocks_for, forms_of, make_fused_program
from detcomm.cuda.peer.layout import Layout
from detcomm.cuda.peer.program import NOTHING, InPlace, make_peer_program
from detcomm.cuda.program import Compiler, Program, make_program
from detcomm.errors import UsageError
from detcomm.options import Options
from detcomm.plan import Plan
from detcomm.request import Request

_CACHED_CALLS = 1024
_CACHED_PROGRAMS = 256
_CACHED_PLANS = 4
"""Of a whole block, while a call is prepared."""

_ALIGNMENT_BYTES = 256


class Prepared:
    """One call on one rank.

    Attributes:
        program: ``None`` where there is nothing to exchange.
        scratch_bytes: that it needs, rounded up; none where ranks read each other's staging areas.
        staging_bytes: that the staging area of each rank of the block must have.
        is_fused: whether the program is one launch, which calls in graphs do not take.
    """

    __slots__ = ("call", "input_bytes", "is_fused", "output_bytes", "program", "scratch_bytes", "staging_bytes")

    def __init__(self, call: Call, rank: int, program: Program | None, staging_bytes: int | None = None) -> None:
        size = call.dtype.itemsize
        self.call = call
        self.input_bytes = call.input_count(rank) * size
        self.output_bytes = call.output_count(rank) * size
        self.program = program
        scratch_bytes = 0 if program is None or staging_bytes is not None else program.scratch_bytes
        self.staging_bytes = staging_bytes or 0
        self.is_fused = False
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
        staging_bytes: of the eager segment, where the ranks of a block read each other's memory.
        most_blocks: that may wait for peers in one launch; 0: short calls go as others do.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        options: Options,
        block_size: int,
        kernels: Kernels,
        staging_bytes: int | None = None,
        most_blocks: int = 0,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._options = options
        self._block_size = block_size
        self._kernels = kernels
        self._staging_bytes = staging_bytes
        self._most_blocks = most_blocks
        self._plans = lru_cache(maxsize=_CACHED_PLANS)(self._make_plans)
        self._layouts = lru_cache(maxsize=_CACHED_PROGRAMS)(self._make_layouts)
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
        fused = self._make_fused(call)
        prepared = Prepared(call, self._rank, fused or self._programs(call, NOTHING), self._need(call))
        prepared.is_fused = fused is not None
        self._known[id(call)] = prepared
        return prepared

    def variant(self, prepared: Prepared, in_place: InPlace, capturing: bool) -> Program:
        """The program of a call that is not one launch, whose memory peers may read where it lies."""
        if in_place is NOTHING and not prepared.is_fused:
            program = prepared.program
        else:
            restore = relaxed_capture() if capturing else None  # kernels may have to be loaded
            try:
                program = self._programs(prepared.call, in_place)
            finally:
                if restore is not None:
                    restore()
        assert program is not None, "nothing to exchange"
        return program

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
        self._programs.cache_clear()
        self._plans.cache_clear()
        self._layouts.cache_clear()

    def _make_plans(self, call: Call) -> dict[int, Plan]:
        """Of all ranks of the block, computed here."""
        assert self._staging_bytes is not None
        first = self._rank // self._block_size * self._block_size
        block = range(first, min(first + self._block_size, self._world_size))
        return bounded_peer_plans(call, block, self._world_size, self._options, self._block_size, self._staging_bytes)

    def _make_program(self, call: Call, in_place: InPlace) -> Program | None:
        if self._world_size == 1 or not call.count:
            return None
        if self._staging_bytes is None:
            plan = bounded_plan(call, self._rank, self._world_size, self._options, self._block_size)
            return make_program(plan, self._compiler())
        plan = self._plans(call)[self._rank]
        return make_peer_program(plan, self._layouts(call), self._compiler(), in_place)

    def _compiler(self) -> Compiler:
        kernels = self._kernels
        return Compiler(
            kernels.fold, kernels.fold_blocks, kernels.copy, copy_blocks, kernels.peer_fold, kernels.peer_copy,
            peer_copy_blocks, kernels.sync, kernels.fused,
        )  # fmt: skip

    def _make_fused(self, call: Call) -> Program | None:
        """The call in one launch, if all ranks' plans have the form for it."""
        message_bytes = call.count * call.dtype.itemsize
        if not self._most_blocks or not 0 < message_bytes <= FUSED_BYTES:
            return None
        forms = forms_of(self._plans(call))
        num_blocks = blocks_for(message_bytes, self._most_blocks)
        if forms is None or max(form.slice_bytes(num_blocks) for form in forms.values()) > SLICE_BYTES:
            return None
        return make_fused_program(forms, self._rank, self._compiler(), num_blocks)

    def _make_layouts(self, call: Call) -> dict[int, Layout]:
        """Of all ranks of the block, computed here from their plans."""
        plans = self._plans(call)
        return {rank: Layout(plan, set(plans) - {rank}) for rank, plan in plans.items()}

    def _need(self, call: Call) -> int | None:
        if self._staging_bytes is None or self._world_size == 1 or not call.count:
            return None
        return max(layout.num_bytes for layout in self._layouts(call).values())
