# SPDX-License-Identifier: Apache-2.0
"""Runs a plan: for each step packs, one exchange, unpacks, folds. Chooses nothing, and knows no schedule.

A ``PreparedPlan`` holds what does not depend on the buffers of one call (fold specifications, slices), so that a
cached plan costs only NumPy views a step.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from detcomm.collectives import ReduceOp
from detcomm.errors import DetcommError
from detcomm.fold import FoldSpec, fold
from detcomm.plan import Fold, Message, Plan, PlanStep, Region, Space
from detcomm.transports.base import Bytes, Parcel, Transport

_SPACES = {Space.INPUT: 0, Space.OUTPUT: 1, Space.SCRATCH: 2}


class _Run(NamedTuple):
    """A region, ready to slice."""

    buffer: int
    window: slice


def _run(region: Region) -> _Run:
    return _Run(_SPACES[region.space], slice(region.offset, region.offset + region.num_bytes))


class _Step:
    """A ``PlanStep`` with its regions ready to slice."""

    __slots__ = ("copies_after", "copies_before", "folds", "recvs", "sends")

    def __init__(self, step: PlanStep, plan: Plan) -> None:
        assert step.gather is None, "plans for host memory have messages alone"
        self.copies_before = tuple((_run(copy.src), _run(copy.dst)) for copy in step.packs)
        self.sends = tuple(_messages(step.sends))
        self.recvs = tuple(_messages(step.recvs))
        self.copies_after = tuple((_run(copy.src), _run(copy.dst)) for copy in step.unpacks)
        self.folds = tuple(
            (_fold_spec(fold, plan), tuple(_run(region) for region in fold.inputs), _run(fold.output))
            for fold in step.folds
            if fold.count
        )

    def run(self, buffers: Sequence[Bytes], transport: Transport, deadline: float) -> None:
        for src, dst in self.copies_before:
            np.copyto(buffers[dst.buffer][dst.window], buffers[src.buffer][src.window])
        if self.sends or self.recvs:
            sends = [Parcel(peer, buffers[run.buffer][run.window]) for peer, run in self.sends]
            recvs = [Parcel(peer, buffers[run.buffer][run.window]) for peer, run in self.recvs]
            transport.exchange(sends, recvs, max(deadline - time.monotonic(), 0.0))
        for src, dst in self.copies_after:
            np.copyto(buffers[dst.buffer][dst.window], buffers[src.buffer][src.window])
        for spec, operands, result in self.folds:
            inputs = [buffers[run.buffer][run.window] for run in operands]
            fold(spec, inputs, buffers[result.buffer][result.window])


def _messages(messages: Sequence[Message]) -> list[tuple[int, _Run]]:
    return [(message.peer, _run(message.region)) for message in messages if message.region.num_bytes]


def _fold_spec(fold: Fold, plan: Plan) -> FoldSpec:
    op = plan.call.op
    assert op is not None, "a plan without an operation has no folds"
    return FoldSpec(
        op=ReduceOp.SUM if op is ReduceOp.PREMUL_SUM else op,  # bits: the senders have multiplied already
        dtype=plan.call.dtype,
        accumulate=plan.accumulate,
        shape=fold.shape,
        leaves=fold.leaves,
        final=fold.final,
        divisor=plan.world_size,  # bits: AVG divides by the number of ranks, once
    )


class PreparedPlan:
    """A plan, ready to run again and again on different buffers."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._steps = tuple(_Step(step, plan) for step in plan.steps)

    def execute(self, transport: Transport, input: Bytes, output: Bytes, scratch: Bytes, timeout_s: float) -> None:
        """Do the plan's steps in order.

        Args:
            transport: of the plan's rank and world size.
            input: the caller's input, all of it.
            output: the caller's output; may be the same memory as ``input``.
            scratch: at least ``plan.scratch_bytes``.
            timeout_s: for all the steps together.

        Raises:
            TransportError: a peer is lost or late; names collective, step and peer. The output is undefined then.
        """
        buffers = (input, output, scratch)
        deadline = time.monotonic() + timeout_s
        for index, step in enumerate(self._steps):
            try:
                step.run(buffers, transport, deadline)
            except DetcommError as error:
                raise type(error)(f"{self._where(index)}: {error}") from error

    def _where(self, index: int) -> str:
        plan = self.plan
        return (
            f"{plan.call.text()}, {plan.schedule}, rank {plan.rank} of {plan.world_size}, "
            f"step {index + 1} of {len(self._steps)}"
        )


def execute(plan: Plan, transport: Transport, input: Bytes, output: Bytes, scratch: Bytes, timeout_s: float) -> None:
    """Run a plan once; see ``PreparedPlan.execute``."""
    PreparedPlan(plan).execute(transport, input, output, scratch, timeout_s)
