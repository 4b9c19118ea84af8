# SPDX-License-Identifier: Apache-2.0
"""Two golden runs side by side: the first step and tensor that differ, and all others.

Knows the files alone: no tensors, no ranks, no torch.
"""

from collections.abc import Iterator
from typing import Any

import attrs

from detcomm.errors import UsageError
from detcomm.golden.file import GoldenRun, Step

MUST_AGREE = ("numerics", "world_size")
"""Runs that differ in one of these are not comparable: their bits differ by right."""

ABSENT = "absent"


@attrs.frozen
class Difference:
    """One thing that is not as in the reference.

    Attributes:
        kind: ``loss``, ``gradients``, …; ``step`` if one of the runs lacks the step.
        name: of the tensor; empty for the loss, a step, or a kind of which only summaries are known.
    """

    step: int
    kind: str
    name: str
    expected: str
    got: str

    @property
    def what(self) -> str:
        """Kind and name, for people."""
        return f"{self.kind} of {self.name}" if self.name else self.kind


@attrs.frozen
class Setting:
    """An entry of the environment or the config that differs."""

    name: str
    expected: Any
    got: Any


@attrs.frozen
class Comparison:
    """What a comparison has found.

    Attributes:
        num_steps: steps that both have.
        num_compared: losses, tensors and summaries that were compared.
        differences: first step first; within a step in the order in which they are computed.
        settings: differences that do not keep runs from being compared.
    """

    num_steps: int
    num_compared: int
    differences: tuple[Difference, ...]
    settings: tuple[Setting, ...]

    @property
    def equal(self) -> bool:
        """Whether every bit that was compared is the same."""
        return not self.differences


def compare(reference: GoldenRun, run: GoldenRun, *, common_steps: bool = False, force: bool = False) -> Comparison:
    """Compare a run with a reference.

    Args:
        common_steps: compare only steps that both have, as after a restart; otherwise a missing step is a difference.
        force: compare though the numerics or the world sizes differ.

    Raises:
        UsageError: they are not comparable.
    """
    settings = [
        *_settings("", reference.environment, run.environment),
        *_settings("config.", reference.config, run.config),
    ]
    refused = [setting for setting in settings if setting.name in MUST_AGREE]
    if refused and not force:
        texts = [f"{setting.name}: expected {setting.expected}, got {setting.got}" for setting in refused]
        raise UsageError(f"the runs are not comparable, their bits differ by right: {'; '.join(texts)}")
    both = reference.steps.keys() & run.steps.keys()
    if not both:
        raise UsageError(f"no step in common: expected {_extent(reference)}, got {_extent(run)}")
    differences: list[Difference] = []
    num_compared = 0
    for step in sorted(both if common_steps else reference.steps.keys() | run.steps.keys()):
        if step not in both:
            here = ("recorded", ABSENT) if step in reference.steps else (ABSENT, "recorded")
            differences.append(Difference(step, "step", "", *here))
            continue
        for kind, name, expected, got in _pairs(reference.steps[step], run.steps[step]):
            num_compared += 1
            if expected != got:
                differences.append(Difference(step, kind, name, expected, got))
    return Comparison(len(both), num_compared, tuple(differences), tuple(settings))


def _pairs(reference: Step, run: Step) -> Iterator[tuple[str, str, str, str]]:
    """Kind, name and both texts of all that either has."""
    if reference.loss or run.loss:
        expected, got = _loss(reference), _loss(run)
        yield "loss", "", expected, got
    if reference.tensors and run.tensors:
        for kind, name in dict.fromkeys([*reference.tensors, *run.tensors]):
            one, other = reference.tensors.get((kind, name)), run.tensors.get((kind, name))
            if one is not None and other is not None and one.form != other.form:
                yield kind, name, one.form, other.form
            else:
                yield kind, name, one.digest if one else ABSENT, other.digest if other else ABSENT
    else:
        for kind in dict.fromkeys([*reference.summary, *run.summary]):
            yield kind, "", reference.summary.get(kind, ABSENT), run.summary.get(kind, ABSENT)


def _loss(step: Step) -> str:
    if step.loss is None:
        return ABSENT
    loss = step.loss
    return f"{loss['decimal']} ({loss['bits']} {loss['dtype']}; {loss['ranks']} ranks: {loss['digest']})"


def _settings(prefix: str, reference: dict[str, Any], run: dict[str, Any]) -> Iterator[Setting]:
    for name in dict.fromkeys([*reference, *run]):
        expected, got = reference.get(name, ABSENT), run.get(name, ABSENT)
        if isinstance(expected, dict) and isinstance(got, dict):
            yield from _settings(f"{prefix}{name}.", expected, got)
        elif expected != got:
            yield Setting(prefix + name, expected, got)


def _extent(run: GoldenRun) -> str:
    return f"steps {min(run.steps)} to {max(run.steps)}"
