# SPDX-License-Identifier: Apache-2.0
"""The plans of all ranks of a call side by side: what lowering must not break.

``simulate`` proves a schedule; this proves that its plans still fit each other once they are bytes.
"""

from collections import defaultdict
from collections.abc import Sequence

from detcomm.errors import ScheduleError
from detcomm.plan import Plan, PlanStep, Region, Space


def check_plans(plans: Sequence[Plan]) -> int:
    """Check the plans of ranks 0…N-1 of one call; return the bytes that all ranks send.

    Every send has its receive, of the same size, in the same step, at the same place among the pair's messages. No
    exchange writes what it also reads or writes twice; no region leaves its buffer.

    Raises:
        ScheduleError: naming rank, step and region.
    """
    num_steps = max(len(plan.steps) for plan in plans)
    for plan in plans:
        for index, step in enumerate(plan.steps):
            _check_step(plan, index, step)
    for index in range(num_steps):
        sent: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        received: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for plan in plans:
            if index >= len(plan.steps):
                continue
            for message in plan.steps[index].sends:
                sent[plan.rank, message.peer].append(message.region.num_bytes)
            for message in plan.steps[index].recvs:
                received[message.peer, plan.rank].append(message.region.num_bytes)
        if sent != received:
            pairs = sorted(pair for pair in sent.keys() | received.keys() if sent[pair] != received[pair])
            src, dst = pairs[0]
            raise ScheduleError(
                f"step {index}: rank {src} sends {sent[src, dst]} bytes to rank {dst}, "
                f"which expects {received[src, dst]}"
            )
    return sum(plan.sent_bytes for plan in plans)


def _check_step(plan: Plan, index: int, step: PlanStep) -> None:
    where = f"{plan.schedule}, rank {plan.rank}, step {index}"
    limits = {
        Space.INPUT: plan.call.input_count(plan.rank) * plan.call.dtype.itemsize,
        Space.OUTPUT: plan.call.output_count(plan.rank) * plan.call.dtype.itemsize,
        Space.SCRATCH: plan.scratch_bytes,
    }
    reads = [message.region for message in step.sends]
    writes = [message.region for message in step.recvs]
    touched = reads + writes
    for copy in step.packs + step.unpacks:
        touched += [copy.src, copy.dst]
    for fold in step.folds:
        touched += [*fold.inputs, fold.output]
    for region in touched:
        if region.offset < 0 or region.offset + region.num_bytes > limits[region.space]:
            raise ScheduleError(f"{where}: {region} leaves its buffer of {limits[region.space]} bytes")
    _check_disjoint(where, reads, writes)
    for fold in step.folds:
        for other in step.folds:
            if other is not fold and any(fold.output.overlaps(region) for region in (*other.inputs, other.output)):
                raise ScheduleError(f"{where}: a fold writes {fold.output}, which another fold uses")


def _check_disjoint(where: str, reads: list[Region], writes: list[Region]) -> None:
    events = sorted(
        [(region.space.value, region.offset, region.offset + region.num_bytes, True) for region in writes]
        + [(region.space.value, region.offset, region.offset + region.num_bytes, False) for region in reads]
    )
    reach: dict[tuple[str, bool], int] = {}
    for space, start, stop, writes_it in events:
        if start == stop:
            continue
        blocked = max(reach.get((space, True), 0), reach.get((space, False), 0) if writes_it else 0)
        if start < blocked:
            raise ScheduleError(f"{where}: the exchange writes {space}[{start}:{stop}] and uses it otherwise too")
        reach[space, writes_it] = max(reach.get((space, writes_it), 0), stop)
