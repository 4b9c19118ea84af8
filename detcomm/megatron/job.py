# SPDX-License-Identifier: Apache-2.0
"""The training job of this process, as ``initialize`` has put it in place: one at a time."""

import attrs

from detcomm.errors import UsageError
from detcomm.megatron.policy import Policy
from detcomm.megatron.replacements import Replacements
from detcomm.megatron.routing import Router
from detcomm.megatron.step_switch import StepSwitch
from detcomm.options import Options


@attrs.frozen
class Job:
    """What ``initialize`` has put in place.

    Args:
        backend: of the group of all ranks.
        options: of fixed-order groups whose rule names no others.
        environment_set: variables that were absent, as ``NAME=value``.
        switch: of a job that is in fixed order for some of its steps alone.
    """

    backend: str
    policy: Policy
    options: Options
    rank: int
    world_size: int
    environment_set: tuple[str, ...]
    exact_grad_norm: bool
    switch: StepSwitch | None
    router: Router = attrs.field(repr=False)
    replacements: Replacements = attrs.field(repr=False)

    @property
    def numerics_id(self) -> str:
        """The name of the bits: ``tree/1:float32``."""
        return self.options.numerics_id

    def at_step(self, step: int) -> bool:
        """Tell which step comes; on all ranks, before each. Megatron's own training loop does so by itself.

        Returns:
            Whether it will be in fixed order.

        Raises:
            MismatchError, TransportError: see ``StepSwitch.at``.
        """
        return True if self.switch is None else self.switch.at(step)

    def close(self) -> None:
        """Put Megatron's functions back. The groups stay as they are; ``destroy_process_group`` ends them."""
        global _current
        self.replacements.undo()
        if _current is self:
            _current = None


_current: Job | None = None


def run(job: Job) -> None:
    """Make it the job of this process."""
    global _current
    _current = job


def is_running() -> bool:
    """Whether there is one."""
    return _current is not None


def current() -> Job:
    """The job of this process.

    Raises:
        UsageError: ``initialize`` was not called, or its job is closed.
    """
    if _current is None:
        raise UsageError("detcomm.megatron.initialize has not been called in this process")
    return _current
