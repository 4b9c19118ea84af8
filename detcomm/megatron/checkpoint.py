# SPDX-License-Identifier: Apache-2.0
"""What decides the bits of a run's sums, as plain values that travel in its checkpoints, and their comparison.

A resume under another numerics id or with other group sizes is another run from that step on: refused unless forced.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from detcomm.errors import UsageError
from detcomm.megatron.job import current
from detcomm.megatron.step_switch import steps_text
from detcomm.version import __version__

KEY = "detcomm"
"""Where the state lies in a checkpoint's common part, and among Megatron's arguments."""

FORMAT = 1

EXACT_NORM, STOCK_NORM = "exact/1", "megatron"

MODULE, SAVING, LOADING = "megatron.training.checkpointing", "generate_state_dict", "check_checkpoint_args"
"""Where Megatron's own training loop saves and loads."""


def checkpoint_state() -> dict[str, Any]:
    """What to save: equal on all ranks, of plain types. Call it when Megatron has made its groups.

    Raises:
        UsageError: ``initialize`` has not been called.
    """
    job = current()
    return {
        "format": FORMAT,
        "version": __version__,
        "numerics_id": job.numerics_id,
        "steps": None if job.switch is None else steps_text(job.switch.steps),
        "gradient_norm": EXACT_NORM if job.exact_grad_norm else STOCK_NORM,
        "groups": {
            description: {"sizes": sorted(made.sizes), "numerics_id": made.numerics_id}
            for description, made in sorted(job.router.made.items())
        },
    }


def check_checkpoint_state(state: Mapping[str, Any] | None, force: bool = False) -> list[str]:
    """Compare a loaded state with this run's.

    Groups of one rank count for nothing on either side, since nothing is added there.

    Args:
        state: what ``checkpoint_state`` returned in the run that saved; ``None`` if the checkpoint has none.
        force: warn instead of refusing.

    Returns:
        The differences.

    Raises:
        UsageError: with all differences.
    """
    found = _differences(state, checkpoint_state())
    if found and not force:
        raise UsageError(
            f"this checkpoint is of a run with other bits: {'; '.join(found)}. To go on all the same: --force-resume, "
            "or force_resume=True (force=True here)"
        )
    for difference in found:
        warnings.warn(f"detcomm.megatron: resumed under other numerics: {difference}", RuntimeWarning, stacklevel=2)
    return found


def saving(original: Callable[..., Any]) -> Callable[..., Any]:
    """``generate_state_dict`` of Megatron's training loop: the state travels among the arguments."""

    def generate_state_dict(args: Any, *rest: Any, **options: Any) -> Any:
        setattr(args, KEY, checkpoint_state())
        return original(args, *rest, **options)

    return generate_state_dict


def loading(force: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``check_checkpoint_args`` of Megatron's training loop, which it leaves out for ``--finetune``."""

    def replacing(original: Callable[..., Any]) -> Callable[..., Any]:
        def check_checkpoint_args(checkpoint_args: Any, *rest: Any, **options: Any) -> Any:
            check_checkpoint_state(getattr(checkpoint_args, KEY, None), force)
            return original(checkpoint_args, *rest, **options)

        return check_checkpoint_args

    return replacing


def _differences(saved: Mapping[str, Any] | None, own: Mapping[str, Any]) -> list[str]:
    if saved is None:
        return ["it was not saved under detcomm.megatron"]
    if saved.get("format") != FORMAT:
        return [f"its state has format {saved.get('format')!r}, expected {FORMAT}"]
    found = [
        f"{name}: saved {saved.get(name)}, now {own[name]}"
        for name in ("numerics_id", "steps", "gradient_norm")
        if saved.get(name) != own[name]
    ]
    theirs, ours = _that_add(saved["groups"]), _that_add(own["groups"])
    for description in sorted(theirs.keys() | ours.keys()):
        before, now = theirs.get(description), ours.get(description)
        if before != now:
            found.append(f"{description}: saved {_group_text(before)}, now {_group_text(now)}")
    return found


def _that_add(groups: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dict(group) for name, group in groups.items() if max(group["sizes"]) > 1}


def _group_text(group: Mapping[str, Any] | None) -> str:
    if group is None:
        return "no group of several ranks"
    return f"{group['numerics_id']} of {' and '.join(map(str, group['sizes']))} ranks"
