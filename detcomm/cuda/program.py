# SPDX-License-Identifier: Apache-2.0
"""A plan made ready for CUDA streams: an array of operations for ``dc_cuda_issue``.

A plan of several pieces runs on two streams, see ``stream_order``; a plan of one piece on one, where order needs no
events. Knows no addresses and no CUDA.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, NamedTuple

from detcomm.collectives import ReduceOp
from detcomm.cuda import native
from detcomm.cuda.native import MAX_COPIES, CFailure, COp, CProgram, CRegion, CSignal
from detcomm.cuda.stream_order import MAIN, SIDE, Item, Span, ordered, place
from detcomm.fold_spec import FoldSpec
from detcomm.plan import Copy, Fold, Message, Plan, PlanStep, Region, Space

BUFFERS = {Space.INPUT: 0, Space.OUTPUT: 1, Space.SCRATCH: 2}
"""``dc_cuda_region.buffer``; of a peer's memory from ``PEER_STAGING`` on."""

PEER_STAGING, PEER_INPUT, PEER_OUTPUT = 3, 4, 5


@dataclass(frozen=True, slots=True)
class Counts:
    """What one run of a program does; to compare with the plan's formulas."""

    num_groups: int
    """NCCL groups, and gathers."""
    num_launches: int
    num_syncs: int
    """Of the launches, those of one block that tell peers and wait for them."""
    sent_bytes: int
    """By NCCL."""
    received_bytes: int
    folded_bytes: int
    """Read and written by folds."""
    copied_bytes: int
    """Read and written by copies."""
    peer_bytes: int
    """Of those read, what lies in peers' memory."""


class Program(NamedTuple):
    """A plan ready to issue; the arrays live as long as the program does.

    Attributes:
        address: of the structure, for native code.
        scratch_bytes: that it needs; of a program that has to do with peers' memory, in the staging area.
    """

    plan: Plan
    structure: CProgram
    address: int
    ops: Any
    regions: Any
    signals: Any
    uses_side_stream: bool
    scratch_bytes: int
    counts: Counts


class Compiler(NamedTuple):
    """What a program needs of the kernels.

    Attributes:
        fold: a kernel for a specification.
        fold_blocks: its blocks, from elements and bytes of a leaf.
        copy: the kernel of copies.
        copy_blocks: the blocks of a row, from the bytes of the longest.
        peer_fold: as ``fold``, for operands in peers' memory.
        peer_copy: as ``copy``, for sources in peers' memory.
        peer_copy_blocks: as ``copy_blocks``, for few long copies.
        sync: the kernel that tells peers and waits for them.
        fused: the kernel of a whole short call, with its fold or without one.
    """

    fold: Callable[[FoldSpec], int]
    fold_blocks: Callable[[int, int], int]
    copy: Callable[[], int]
    copy_blocks: Callable[[int], int]
    peer_fold: Callable[[FoldSpec], int]
    peer_copy: Callable[[], int]
    peer_copy_blocks: Callable[[int], int]
    sync: Callable[[], int]
    fused: Callable[[FoldSpec | None], int]


def make_program(plan: Plan, compiler: Compiler) -> Program:
    """Make a plan ready.

    Raises:
        UnsupportedError: a fold of more operands than a kernel takes.
    """
    return Builder(plan, compiler).build()


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


def own_region(region: Region, peer: int = 0) -> CRegion:
    """A region of this rank's memory; of a message, with its peer."""
    return CRegion(region.offset, region.num_bytes, BUFFERS[region.space], peer, 0)


@dataclass
class Builder:
    """Turns a plan's steps into operations, then into a program. Messages go by NCCL.

    Args:
        plan: of one rank.
        compiler: gives the kernels.
    """

    plan: Plan
    compiler: Compiler
    items: list[Item] = field(default_factory=list)

    def build(self) -> Program:
        """The program."""
        two_streams = self.is_pipelined()
        for index, step in enumerate(self.plan.steps):
            self.add_step(index, step)
        self.finish()
        ops = ordered(self.items) if two_streams else [item.op for item in self.items]
        counts = _counts(self.plan.world_size, self.items)
        return program_of(self.plan, ops, self.items, two_streams, self.scratch_bytes(), counts)

    def is_pipelined(self) -> bool:
        """Whether exchanges follow each other without a pause for folds: the plan has several pieces."""
        exchanges = [bool(step.sends or step.recvs or step.gather) for step in self.plan.steps]
        return any(first and second for first, second in pairwise(exchanges))

    def add_step(self, index: int, step: PlanStep) -> None:
        """The operations of one step of the plan."""
        self.add_copies(step.packs)
        self.add_exchange(step.sends, step.recvs)
        if step.gather is not None:
            self._add_gather(step.gather)
        self.add_copies(step.unpacks)
        for fold in step.folds:
            if fold.count:
                self.add_fold(fold)

    def finish(self) -> None:
        """What comes behind the last step."""

    def scratch_bytes(self) -> int:
        """That the program needs."""
        return self.plan.scratch_bytes

    # -- operations ---------------------------------------------------------------------------------------------

    def add_copies(self, copies: Sequence[Copy]) -> None:
        """In as few launches as their order allows: copies of one launch run in no order."""
        batch: list[Copy] = []
        reads: list[Span] = []
        writes: list[Span] = []
        for copy in copies:
            if not copy.src.num_bytes:
                continue
            read, write = self.span(copy.src), self.span(copy.dst)
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
        op = COp(kind=native.COPY, num_blocks=self.compiler.copy_blocks(longest), kernel=self.compiler.copy())
        regions = [own_region(region) for copy in batch for region in (copy.src, copy.dst)]
        self.add(Item(op, regions, reads, writes, SIDE))

    def add_exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        """One NCCL group."""
        sends, recvs = filled(sends), filled(recvs)
        if not sends and not recvs:
            return
        op = COp(kind=native.EXCHANGE, num_sends=len(sends))
        regions = [own_region(message.region, message.peer) for message in (*sends, *recvs)]
        reads = [self.span(message.region) for message in sends]
        writes = [self.span(message.region) for message in recvs]
        self.add(Item(op, regions, reads, writes, MAIN))

    def _add_gather(self, gather: Copy) -> None:
        regions = [own_region(gather.src), own_region(gather.dst)]
        self.add(Item(COp(kind=native.GATHER), regions, [self.span(gather.src)], [self.span(gather.dst)], MAIN))

    def add_fold(self, fold: Fold) -> None:
        """A fold of this rank's memory."""
        spec = fold_spec(fold, self.plan)
        op = self.fold_op(native.FOLD, fold, self.compiler.fold(spec))
        regions = [own_region(region) for region in (*fold.inputs, fold.output)]
        reads = [self.span(region) for region in fold.inputs]
        self.add(Item(op, regions, reads, [self.span(fold.output)], SIDE))

    def fold_op(self, kind: int, fold: Fold, kernel: int) -> COp:
        """The operation of a fold, without its regions."""
        spec = fold_spec(fold, self.plan)
        blocks = self.compiler.fold_blocks(fold.count, spec.dtype.itemsize)
        return COp(kind=kind, num_blocks=blocks, kernel=kernel, count=fold.count, divisor=spec.divisor)

    def add(self, item: Item) -> None:
        """The next operation."""
        self.items.append(item)

    def span(self, region: Region) -> Span:
        """What a region of this rank clashes with."""
        return place(self.plan.call, self.plan.rank, region)


def program_of(
    plan: Plan, ops: Sequence[COp], items: Sequence[Item], two_streams: bool, scratch_bytes: int, counts: Counts
) -> Program:
    """Operations as arrays.

    Args:
        ops: those of the items, and what orders them.
    """
    regions: list[CRegion] = []
    signals: list[CSignal] = []
    for item in items:
        item.op.first_region = len(signals) if item.signals else len(regions)
        item.op.num_regions = len(item.signals or item.regions)
        regions += item.regions
        signals += item.signals
    c_ops, c_regions, c_signals = _array(COp, ops), _array(CRegion, regions), _array(CSignal, signals)
    structure = CProgram(
        ctypes.cast(c_ops, ctypes.POINTER(COp)),
        ctypes.cast(c_regions, ctypes.POINTER(CRegion)),
        ctypes.cast(c_signals, ctypes.POINTER(CSignal)),
        len(ops),
        len(regions),
    )
    address = ctypes.addressof(structure)
    return Program(plan, structure, address, c_ops, c_regions, c_signals, two_streams, scratch_bytes, counts)


def _counts(world_size: int, items: Sequence[Item]) -> Counts:
    def of(*kinds: int) -> list[Item]:
        return [item for item in items if item.op.kind in kinds]

    exchanges, gathers, syncs = of(native.EXCHANGE), of(native.GATHER), of(native.SYNC)
    folds, copies = of(native.FOLD, native.PEER_FOLD), of(native.COPY, native.PEER_COPY)
    gathered_bytes = (world_size - 1) * _total(item.regions[0] for item in gathers)
    sent = [item.regions[: item.op.num_sends] for item in exchanges]
    received = [item.regions[item.op.num_sends :] for item in exchanges]
    moved = [region for item in (*folds, *copies) for region in item.regions]
    return Counts(
        num_groups=len(exchanges) + len(gathers),
        num_launches=len(folds) + len(copies) + len(syncs),
        num_syncs=len(syncs),
        sent_bytes=_total(chain.from_iterable(sent)) + gathered_bytes,
        received_bytes=_total(chain.from_iterable(received)) + gathered_bytes,
        folded_bytes=_total(region for item in folds for region in item.regions),
        copied_bytes=_total(region for item in copies for region in item.regions),
        peer_bytes=_total(region for region in moved if region.buffer >= PEER_STAGING),
    )


def _array(kind: Any, values: Sequence[Any]) -> Any:
    return (kind * len(values))(*values)


def filled(messages: Sequence[Message]) -> list[Message]:
    """Those with bytes in them."""
    return [message for message in messages if message.region.num_bytes]


def _total(regions: Iterable[CRegion]) -> int:
    return sum(region.num_bytes for region in regions)
