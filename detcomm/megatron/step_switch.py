# SPDX-License-Identifier: Apache-2.0
"""Fixed order for a range of steps, the stock library for the others: for a replay or an audit inside a long run.

Sound between steps alone: nothing may be in flight while the groups change over, and all ranks must do it at the same
step. So each group drains, then all ranks compare what they are about to do, then each goes on. What is promised: the
bits of the steps in the range follow from the state before its first step.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from detcomm.errors import MismatchError, UsageError

MODULE, FUNCTION = "megatron.training.training", "train_step"

_FOR_EVER = 1 << 62


def parse_steps(text: str) -> range:
    """The steps of ``1000:1100``, the last one excluded; ``1000:`` has no end.

    Raises:
        UsageError: it is no such range.
    """
    start, colon, stop = text.partition(":")
    if not colon or not start.isdigit() or not (stop.isdigit() or not stop):
        raise UsageError(f"steps: expected FIRST:END, as 1000:1100, got {text!r}")
    steps = range(int(start), int(stop) if stop else _FOR_EVER)
    if not steps:
        raise UsageError(f"steps: {text!r} holds no step")
    return steps


def steps_text(steps: range) -> str:
    """What ``parse_steps`` reads."""
    return f"{steps.start}:{'' if steps.stop == _FOR_EVER else steps.stop}"


class StepSwitch:
    """Turns the groups of this rank at the edges of a range of steps.

    Args:
        groups: gives the switched groups of this rank, in the order in which they were made.
    """

    def __init__(self, steps: range, groups: Callable[[], Iterable[Any]]) -> None:
        self.steps = steps
        self.fixed_order = True
        """As the groups are now. They are made so: a model is set up in fixed order."""
        self._groups = groups

    def at(self, step: int) -> bool:
        """Call before each step on every rank; free but at an edge of the range.

        Returns:
            Whether the step that follows is in fixed order.

        Raises:
            MismatchError: the ranks are not at one step, or have other ranges; no group was changed.
            TransportError: a rank did not come to the edge; the groups are unusable.
        """
        wanted = step in self.steps
        if wanted != self.fixed_order:
            self._turn(step, wanted)
        return wanted

    def _turn(self, step: int, wanted: bool) -> None:
        groups = list(self._groups())
        for group in groups:
            if group.size() > 1:
                group.barrier().wait()  # all that was issued here is done, and all its ranks are at an edge
        own = f"step {step} {'in fixed order' if wanted else 'in stock order'} (steps {steps_text(self.steps)})"
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, own)
        if len(set(told)) > 1:
            parts = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told))
            raise MismatchError(f"the ranks disagree on the order of additions from here on: {parts}")
        for group in groups:
            group.fixed_order = wanted
        self.fixed_order = wanted


def replacing(switch: StepSwitch) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``train_step`` of Megatron's training loop, which tells the step in its arguments."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(*args: Any, **options: Any) -> Any:
            from megatron.training.global_vars import get_args

            switch.at(get_args().curr_iteration)
            return original(*args, **options)

        return train_step

    return make
