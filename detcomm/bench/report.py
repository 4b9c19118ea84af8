# SPDX-License-Identifier: Apache-2.0
"""What was measured, as numbers to print and to keep: bandwidths, ratios, and the machine they belong to."""

import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from detcomm import native
from detcomm.bench.run import Measurement
from detcomm.bench.timing import median_ratio
from detcomm.version import __version__


def describe_machine() -> dict[str, Any]:
    """Where this was measured; without names of hosts or users."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "native_folds": native.variants()[0] if native.available() else "none",
    }


def versions(names: Sequence[str] = ("torch", "numpy", "mpi4py", "mpich")) -> dict[str, str]:
    """Installed versions of what takes part."""
    found = {"detcomm": __version__}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


@dataclass(frozen=True)
class Report:
    """All measurements of one job, seen from ``subject``: the contender that the others are compared with."""

    world_size: int
    subject: str
    measurements: Sequence[Measurement]
    machine: dict[str, Any] = field(default_factory=describe_machine)

    def rows(self) -> list[dict[str, Any]]:
        """One row a case and contender that ran it: times in microseconds, bandwidths in GB/s (1e9 bytes)."""
        subjects = {one.case: one for one in self.measurements if one.contender == self.subject}
        return [self._row(one, subjects.get(one.case)) for one in self.measurements if one.seconds]

    def _row(self, one: Measurement, subject: Measurement | None) -> dict[str, Any]:
        case, seconds = one.case, statistics.median(one.seconds)
        num_bytes = case.count(self.world_size) * case.dtype.itemsize
        algbw = num_bytes / seconds / 1e9
        row = {
            "collective": case.collective.value,
            "dtype": case.dtype.value,
            "bytes": num_bytes,
            "world_size": self.world_size,
            "contender": one.contender,
            "median_us": round(seconds * 1e6, 2),
            "best_us": round(min(one.seconds) * 1e6, 2),
            "worst_us": round(max(one.seconds) * 1e6, 2),
            "algbw": round(algbw, 4),
            "busbw": round(algbw * case.bus_factor(self.world_size), 4),
        }
        if subject is not None and subject.seconds and one is not subject:
            row["times_slower"] = round(median_ratio(one.seconds, subject.seconds), 3)
        return row

    def refusals(self) -> list[str]:
        """What a contender does not have, each once: collective, type, contender, why."""
        told = [
            f"{one.case.collective.value} {one.case.dtype.value} on {one.contender}: {one.refusal}"
            for one in self.measurements
            if one.refusal
        ]
        return list(dict.fromkeys(told))

    def to_json(self) -> dict[str, Any]:
        """Everything, with every round's time."""
        rounds = {
            f"{one.contender} {one.case.collective.value} {one.case.dtype.value} {one.case.num_bytes}": [
                round(seconds * 1e6, 2) for seconds in one.seconds
            ]
            for one in self.measurements
            if one.seconds
        }
        return {
            "taken": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": self.machine,
            "versions": versions(),
            "world_size": self.world_size,
            "subject": self.subject,
            "rows": self.rows(),
            "rounds_us": rounds,
        }
