# SPDX-License-Identifier: Apache-2.0
"""The model against times that were measured: it is fitted on a few of them and predicts the others.

Neither the other sizes of a schedule nor a schedule that the fit has not seen can have told the model their times.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from detcomm.pricing.fitting import Observation, fit
from detcomm.pricing.loads import Message
from detcomm.pricing.machines import Machine
from detcomm.pricing.model import price
from detcomm.schedules import parse


@dataclass(frozen=True)
class Judged:
    """One observation beside the model's time.

    Attributes:
        predicted: whether the fit had not seen it.
    """

    observation: Observation
    model_us: float
    predicted: bool

    @property
    def ratio(self) -> float:
        """Model over measured."""
        return self.model_us / self.observation.time_us


@dataclass(frozen=True)
class Judgement:
    """All observations of one transport and world size."""

    machine: Machine
    rows: tuple[Judged, ...]

    @property
    def median_error(self) -> float:
        """Of the predictions: how far off the median one is, as a share."""
        return statistics.median(abs(row.ratio - 1) for row in self.rows if row.predicted)

    def choices(self) -> dict[int, tuple[str, str, float]]:
        """By size: the schedule that was fastest, the one that the model would choose, and what that choice costs.

        The cost is the measured time of the choice over that of the fastest.
        """
        found = {}
        for size in dict.fromkeys(row.observation.num_bytes for row in self.rows):
            of_size = [row for row in self.rows if row.observation.num_bytes == size]
            fastest = min(of_size, key=lambda row: row.observation.time_us).observation
            chosen = min(of_size, key=lambda row: row.model_us).observation
            found[size] = (fastest.schedule, chosen.schedule, chosen.time_us / fastest.time_us)
        return found


def judge(
    observations: Sequence[Observation], world_size: int, fitted_schedules: Sequence[str], fitted_bytes: Sequence[int]
) -> Judgement:
    """Fit on the observations of these schedules at these sizes, and price all."""
    seen = [one for one in observations if one.schedule in fitted_schedules and one.num_bytes in fitted_bytes]
    machine = fit(seen, world_size)
    rows = []
    for one in observations:
        message = Message(float(one.num_bytes))
        model_us = price(parse(one.schedule, world_size), message, world_size, machine, pieces=(1,)).time_us
        rows.append(Judged(one, model_us, one not in seen))
    return Judgement(machine, tuple(rows))
