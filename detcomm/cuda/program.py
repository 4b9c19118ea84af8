# SPDX-License-Identifier: Apache-2.0
"""A plan made ready for CUDA streams: an array of operations for ``dc_cuda_issue``.

A plan of several pieces runs on two streams, see ``stream_order``; a plan of one piece on one, where order needs no
events. Knows no addresses and no CUDA.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from detcomm.collectives import ReduceOp
from detcomm.cuda.native import COPY, EXCHANGE, FOLD, GATHER, MAX_COPIES, CFailure, COp, CProgram, CRegion
from detcomm.cuda.stream_order import MAIN, SIDE, Item, Span, ordered, place
from detcomm.fold_spec import FoldSpec
from detcomm.plan import Copy, Fold, Message, Plan, PlanStep, Region, Space

_BUFFERS = {Space.INPUT: 0, Space.OUTPUT: 1, Space.SCRATCH: 2}


@dataclass(frozen=True, slots=True)
class Counts:
    """What one run of a program does; to compare with the plan's formulas."""

    num_groups: int
    """NCCL groups, and gathers."""
    num_launches: int
    sent_bytes: int
    received_bytes: int
    folded_bytes: int
    """Read and written by folds."""
    copied_bytes: int
    """Read and written by copies."""


class Program(NamedTuple):
    """A plan ready to issue; the arrays live as long as the program does."""

    plan: Plan
    structure: CProgram
    ops: Any
    regions: Any
    uses_side_stream: bool
    counts: Counts


class Compiler(NamedTuple):
    """What a program needs of the kernels.

    Attributes:
        fold: a kernel for a specification.
        fold_blocks: its blocks, from elements and bytes of a leaf.
        copy: the kernel of copies.
        copy_blocks: the blocks of a row, from the bytes of the longest.
    """

    fold: Callable[[FoldSpec], int]
    fold_blocks: Callable[[int, int], int]
    copy: Callable[[], int]
    copy_blocks: Callable[[int], int]


def make_program(plan: Plan, compiler: Compiler) -> Program:
    """Make a plan ready.

    Raises:
        UnsupportedError: a fold of more operands than a kernel takes.
    """
    return _Builder(plan, compiler).build()


def fold_spec(fold: Fold, plan: Plan) -> FoldSpec:
    """What a fold of a plan does."""
    op = plan.call.op
    assert op is not None, "a plan without an operation has no folds"
    return FoldSpec(
        op=ReduceOp.SUM if op is ReduceOp.PREMUL_SUM else op,
        dtype=plan.call.dtype,
        accumulate=plan.accumulate,
        shape=fold.shape,
        leaves=fold.leaves,
        final=fold.final,
        divisor=plan.world_size,
    )


def failure_text(program: Program, failure: CFailure, describe: Callable[[str, int], str]) -> str:
    """Where issuing stopped, for people; ``describe`` puts into words what a function returned."""
    function = (failure.function or b"").decode()
    return f"{program.plan.call.text()}, {program.plan.schedule}: {function} failed: {describe(function, failure.code)}"


@dataclass
class _Builder:
    plan: Plan
    compiler: Compiler
    items: list[Item] = field(default_factory=list)

    def build(self) -> Program:
        two_streams = _is_pipelined(self.plan.steps)
        for step in self.plan.steps:
            self._copies(step.packs)
            self._exchange(step)
            if step.gather is not None:
                self._gather(step.gather)
            self._copies(step.unpacks)
            for fold in step.folds:
                if fold.count:
                    self._fold(fold)
        ops = ordered(self.items) if two_streams else [item.op for item in self.items]
        regions = [pair for item in self.items for pair in item.regions]
        return self._pack(ops, regions, two_streams)

    # -- operations ---------------------------------------------------------------------------------------------

    def _copies(self, copies: Sequence[Copy]) -> None:
        """In as few launches as their order allows: copies of one launch run in no order."""
        batch: list[Copy] = []
        reads: list[Span] = []
        writes: list[Span] = []
        for copy in copies:
            if not copy.src.num_bytes:
                continue
            read, write = self._span(copy.src), self._span(copy.dst)
            clashes = any(read.overlaps(other) or write.overlaps(other) for other in writes) or any(
                write.overlaps(other) for other in reads
            )
            if batch and (clashes or len(batch) == MAX_COPIES):
                self._copy_launch(batch, reads, writes)
                batch, reads, writes = [], [], []
            batch.append(copy)
            reads.append(read)
            writes.append(write)
        if batch:
            self._copy_launch(batch, reads, writes)

    def _copy_launch(self, batch: list[Copy], reads: list[Span], writes: list[Span]) -> None:
        longest = max(copy.src.num_bytes for copy in batch)
        op = COp(kind=COPY, num_blocks=self.compiler.copy_blocks(longest), kernel=self.compiler.copy())
        regions = [(region, 0) for copy in batch for region in (copy.src, copy.dst)]
        self.items.append(Item(op, regions, reads, writes, SIDE))

    def _exchange(self, step: PlanStep) -> None:
        sends, recvs = _filled(step.sends), _filled(step.recvs)
        if not sends and not recvs:
            return
        op = COp(kind=EXCHANGE, num_sends=len(sends))
        regions = [(message.region, message.peer) for message in (*sends, *recvs)]
        reads = [self._span(message.region) for message in sends]
        writes = [self._span(message.region) for message in recvs]
        self.items.append(Item(op, regions, reads, writes, MAIN))

    def _gather(self, gather: Copy) -> None:
        regions = [(gather.src, 0), (gather.dst, 0)]
        item = Item(COp(kind=GATHER), regions, [self._span(gather.src)], [self._span(gather.dst)], MAIN)
        self.items.append(item)

    def _fold(self, fold: Fold) -> None:
        spec = fold_spec(fold, self.plan)
        op = COp(
            kind=FOLD,
            num_blocks=self.compiler.fold_blocks(fold.count, spec.dtype.itemsize),
            kernel=self.compiler.fold(spec),
            count=fold.count,
            divisor=spec.divisor,
        )
        regions = [(region, 0) for region in (*fold.inputs, fold.output)]
        reads = [self._span(region) for region in fold.inputs]
        self.items.append(Item(op, regions, reads, [self._span(fold.output)], SIDE))

    def _span(self, region: Region) -> Span:
        return place(self.plan.call, self.plan.rank, region)

    # -- arrays -------------------------------------------------------------------------------------------------

    def _pack(self, ops: list[COp], regions: list[tuple[Region, int]], two_streams: bool) -> Program:
        first = 0
        for item in self.items:
            item.op.first_region = first
            item.op.num_regions = len(item.regions)
            first += len(item.regions)
        c_ops = (COp * len(ops))(*ops)
        c_regions = (CRegion * len(regions))(
            *[CRegion(region.offset, region.num_bytes, _BUFFERS[region.space], peer) for region, peer in regions]
        )
        structure = CProgram(
            ctypes.cast(c_ops, ctypes.POINTER(COp)), ctypes.cast(c_regions, ctypes.POINTER(CRegion)), len(ops), first
        )
        return Program(self.plan, structure, c_ops, c_regions, two_streams, self._counts())

    def _counts(self) -> Counts:
        exchanges = [item for item in self.items if item.op.kind == EXCHANGE]
        gathers = [item for item in self.items if item.op.kind == GATHER]
        gathered_bytes = (self.plan.world_size - 1) * _total(span for item in gathers for span in item.reads)
        folds = [item for item in self.items if item.op.kind == FOLD]
        copies = [item for item in self.items if item.op.kind == COPY]
        return Counts(
            num_groups=len(exchanges) + len(gathers),
            num_launches=len(folds) + len(copies),
            sent_bytes=_total(span for item in exchanges for span in item.reads) + gathered_bytes,
            received_bytes=_total(span for item in exchanges for span in item.writes) + gathered_bytes,
            folded_bytes=_total(span for item in folds for span in (*item.reads, *item.writes)),
            copied_bytes=_total(span for item in copies for span in (*item.reads, *item.writes)),
        )


def _is_pipelined(steps: Sequence[PlanStep]) -> bool:
    """Whether exchanges follow each other without a pause for folds: the plan has several pieces."""
    exchanges = [bool(step.sends or step.recvs or step.gather) for step in steps]
    return any(first and second for first, second in pairwise(exchanges))


def _filled(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message.region.num_bytes]


def _total(spans: Any) -> int:
    return sum(span.stop - span.start for span in spans)
