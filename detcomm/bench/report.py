# SPDX-License-Identifier: Apache-2.0
"""What was measured, as numbers to print and to keep: bandwidths, ratios, and the machine they belong to."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from detcomm import native
from detcomm.bench.cases import Place
from detcomm.bench.run import Measurement
from detcomm.bench.timing import median_ratio, percentile
from detcomm.collectives import Collective
from detcomm.version import __version__

_TELLING = ("DETCOMM_", "NCCL_", "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS")
"""Beginnings of the variables that change what is measured."""


def describe_machine() -> dict[str, Any]:
    """Where this was measured; without names of hosts or users."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "native_folds": native.variants()[0] if native.available() else "none",
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_TELLING)},
    } | _describe_gpu()


def _describe_gpu() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    nccl_version: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
    driver = Path("/sys/module/nvidia/version")
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.read_text().strip() if driver.exists() else "unknown",
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl_version())),  # of the library that torch has loaded
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
    device: str = "cpu"
    numerics_id: str = "tree/1:float32"
    machine: dict[str, Any] = field(default_factory=describe_machine)

    def rows(self) -> list[dict[str, Any]]:
        """One row a case and contender that ran it or tried to; see ``row``."""
        subjects = {one.case: one for one in self.measurements if one.contender == self.subject}
        return [row(one, subjects.get(one.case), self.world_size) for one in self.measurements if measured(one)]

    def refusals(self) -> list[str]:
        """What a contender does not have, each once: collective, type, contender, why."""
        return list(dict.fromkeys(text for one in self.measurements for text in refusal_texts(one)))

    def breaches(self) -> list[str]:
        """Results that are wrong, and those of the subject that have other bits than specified."""
        told = []
        for one in self.measurements:
            for place, checked in one.checked.items():
                what = f"{one.contender}: {one.case.collective.value} {one.case.dtype.value} {place.value}"
                if checked.num_wrong:
                    told.append(f"{what}, {one.case.num_bytes} bytes: {checked.num_wrong} elements are wrong")
                if one.contender == self.subject and checked.num_other_bits:
                    told.append(
                        f"{what}, {one.case.num_bytes} bytes: {checked.num_other_bits} elements have other bits"
                    )
        return told

    def to_json(self) -> dict[str, Any]:
        """Everything, with every round's time."""
        rounds = {
            f"{one.contender} {one.case.collective.value} {one.case.dtype.value} {one.case.op.value} "
            f"{one.case.num_bytes} {place.value}": [round(seconds * 1e6, 2) for seconds in times.turns]
            for one in self.measurements
            for place, times in one.times.items()
        }
        return {
            "kind": "collectives",
            "taken": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": self.machine,
            "versions": versions(),
            "world_size": self.world_size,
            "device": self.device,
            "numerics_id": self.numerics_id,
            "subject": self.subject,
            "rows": self.rows(),
            "refusals": self.refusals(),
            "breaches": self.breaches(),
            "rounds_us": rounds,
        }


def measured(one: Measurement) -> bool:
    """Whether there is anything to show of it."""
    return bool(one.times or one.checked)


def refusal_texts(one: Measurement) -> Iterator[str]:
    """Why a contender was not timed, by place; once where it is the same for all places."""
    what = f"{one.case.collective.value} {one.case.dtype.value} on {one.contender}"
    everywhere = len(one.refusals) == len(Place) and len(set(one.refusals.values())) == 1
    for place, why in list(one.refusals.items())[: 1 if everywhere else None]:
        where = "" if everywhere else f", {place.value.replace('_', ' ')}"
        yield f"{what}{where}: {why}"


def row(one: Measurement, subject: Measurement | None, world_size: int) -> dict[str, Any]:
    """One contender on one case: times in microseconds, bandwidths in GB/s (1e9 bytes).

    The times at the top are those of the place that is usual for the collective, or of the only one that was measured;
    ``times_slower`` is the median over the rounds of the ratio to the subject's there, ``longer_us`` of the difference.
    """
    case = one.case
    content: dict[str, Any] = {
        "collective": case.collective.value,
        "dtype": case.dtype.value,
        "op": case.op.value if case.collective.reduces else "none",
        "root": case.root if case.collective is Collective.REDUCE else -1,
        "bytes": case.count(world_size) * case.dtype.itemsize,
        "count": case.count(world_size),
        "world_size": world_size,
        "contender": one.contender,
    }
    for place in Place:
        content[place.value] = _at(one, place, subject, world_size)
    usual = case.usual_place if case.usual_place in one.times else next(iter(one.times), None)
    if usual is not None:
        names = ("median_us", "best_us", "worst_us", "p50_us", "p99_us", "algbw", "busbw", "times_slower", "longer_us")
        content["place"] = usual.value
        content |= {name: content[usual.value][name] for name in names if name in content[usual.value]}
    return content


def _at(one: Measurement, place: Place, subject: Measurement | None, world_size: int) -> dict[str, Any] | None:
    content: dict[str, Any] = {}
    if (checked := one.checked.get(place)) is not None:
        content |= {"wrong": checked.num_wrong, "bitdiff": checked.num_other_bits, "digest": checked.digest}
    if (times := one.times.get(place)) is None:
        return content or None
    seconds = statistics.median(times.turns)
    algbw = one.case.count(world_size) * one.case.dtype.itemsize / seconds / 1e9
    content |= {
        "median_us": round(seconds * 1e6, 2),
        "best_us": round(min(times.turns) * 1e6, 2),
        "worst_us": round(max(times.turns) * 1e6, 2),
        "p50_us": round(percentile(times.calls, 50) * 1e6, 2),
        "p99_us": round(percentile(times.calls, 99) * 1e6, 2),
        "algbw": round(algbw, 4),
        "busbw": round(algbw * one.case.bus_factor(world_size), 4),
    }
    theirs = subject.times.get(place) if subject is not None and subject is not one else None
    if theirs is not None:
        content["times_slower"] = round(median_ratio(times.turns, theirs.turns), 3)
        differences = (other - ours for other, ours in zip(times.turns, theirs.turns, strict=True))
        content["longer_us"] = round(statistics.median(differences) * 1e6, 2)
    return content
