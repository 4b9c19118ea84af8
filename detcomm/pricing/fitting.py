# SPDX-License-Identifier: Apache-2.0
"""The numbers of a machine from times that were measured on it, so that the model can be held against other times.

The model's time of an all-reduce in one piece is linear in five unknowns, with coefficients that are the loads of its
schedule: a call, a step, one more message of a step, a byte sent, a byte folded. They are fitted by least squares of
the relative errors, none below zero. All ranks are on one host: for several the two links would have to be told apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from detcomm.errors import UsageError
from detcomm.pricing.loads import Message, all_reduce_loads
from detcomm.pricing.machines import Machine
from detcomm.schedules import parse

_NEVER = 1e-12
"""Microseconds a byte, in place of none at all: a bandwidth must be a number."""

_US_PER_GB = 1e-3


@dataclass(frozen=True)
class Observation:
    """The measured time of an all-reduce of float32, in one piece."""

    schedule: str
    num_bytes: int
    time_us: float


def fit(observations: Sequence[Observation], world_size: int, name: str = "measured") -> Machine:
    """The machine whose prices come nearest to the observations.

    Raises:
        UsageError: fewer observations than unknowns.
    """
    rows = np.array([_loads(one, world_size) for one in observations], np.float64)
    times = np.array([one.time_us for one in observations], np.float64)
    if len(rows) < rows.shape[-1]:
        raise UsageError(f"to fit {rows.shape[-1]} numbers takes as many observations, got {len(rows)}")
    call, step, message, byte, folded = _least_squares(rows / times[:, None])
    return Machine(
        name=name,
        node_size=world_size,
        local_gb_per_s=_US_PER_GB / max(byte, _NEVER),
        network_gb_per_s=_US_PER_GB / max(byte, _NEVER),
        fold_gb_per_s=_US_PER_GB / max(folded, _NEVER),
        local_latency_us=0.0,  # a step's start and its latency cannot be told apart
        network_latency_us=0.0,
        launch_us=step,
        message_us=message,
        small_latency_us=(0.0, 0.0, 0.0),
        call_us=call,
    )


def _loads(one: Observation, world_size: int) -> tuple[float, ...]:
    loads = all_reduce_loads(parse(one.schedule, world_size), Message(float(one.num_bytes)), world_size, world_size)
    return (
        1.0,
        float(len(loads)),
        float(sum(max(load.num_messages - 1, 0) for load in loads)),
        sum(load.local_bytes for load in loads),
        sum(load.folded_bytes for load in loads),
    )


def _least_squares(rows: NDArray[np.float64]) -> list[float]:
    """Unknowns, none negative, that bring every row times them nearest to one.

    With so few unknowns every set of those that may be positive is tried; the best that has no negative one is it
    (Lawson and Hanson 1974, chapter 23: the solution is a plain least-squares one on its positive set).
    """
    scales = np.abs(rows).max(axis=0)
    scales[scales == 0] = 1.0
    best, least = np.zeros(rows.shape[1]), float(len(rows))
    for chosen in product((False, True), repeat=rows.shape[1]):
        if not any(chosen):
            continue
        columns = np.flatnonzero(chosen)
        values = np.linalg.lstsq(rows[:, columns] / scales[columns], np.ones(len(rows)), rcond=None)[0]
        error = float(np.square(rows[:, columns] / scales[columns] @ values - 1.0).sum())
        if (values >= 0).all() and error < least:
            best, least = np.zeros(rows.shape[1]), error
            best[columns] = values / scales[columns]
    return [float(value) for value in best]
