# SPDX-License-Identifier: Apache-2.0
"""The schedules by name, and the parser of their text."""

import re

from detcomm.errors import UsageError
from detcomm.schedule import Schedule
from detcomm.schedules.binomial import Binomial
from detcomm.schedules.oneshot import Oneshot
from detcomm.schedules.ring import Ring
from detcomm.schedules.staged import Staged, direct, halving, hierarchical

__all__ = ["NAMES", "Binomial", "Oneshot", "Ring", "Staged", "direct", "halving", "hierarchical", "parse"]

NAMES = ("oneshot", "direct", "halving", "hierarchical", "staged(r1,r2,...)", "binomial", "ring")
_STAGED = re.compile(r"staged\((\d+(?:,\d+)*)\)")


def parse(text: str, world_size: int, block_size: int = 1) -> Schedule:
    """The schedule that a text names, for a world.

    Args:
        text: one of ``NAMES``; not ``auto``, which is tuning's to resolve.
        block_size: ranks of one aligned block that share a host, for ``hierarchical``.

    Raises:
        UsageError: if the text names no schedule.
        ScheduleError: if the radices are not legal.
    """
    compact = text.replace(" ", "")
    match compact:
        case "oneshot":
            return Oneshot()
        case "direct":
            return direct(world_size)
        case "halving":
            return halving(world_size)
        case "hierarchical":
            return hierarchical(world_size, block_size)
        case "binomial":
            return Binomial()
        case "ring":
            return Ring()
    if found := _STAGED.fullmatch(compact):
        return Staged(tuple(int(radix) for radix in found[1].split(",")))
    raise UsageError(f"unknown schedule {text!r}; expected one of {', '.join(NAMES)}")
