# SPDX-License-Identifier: Apache-2.0
"""How fast the CPU path should be, as ratios to other libraries measured in the same turns, and the judgement on them.

Ratios, since absolute times belong to one machine. They hold for ranks that share few cores, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

LARGE, MEDIUM, SMALL = 64 << 20, 1 << 20, 4 << 10
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
DTYPES = ("float32", "bfloat16")

LARGE_TIMES_FASTER_THAN_GLOO = {2: 2.0, 4: 3.0, 8: 4.0}
"""By world size: more ranks, more hops for gloo's ring."""

TIMES_FASTER_THAN_GLOO = {MEDIUM: 6.0, SMALL: 20.0}

TIMES_FASTER_THAN_MPI = {("all_reduce", LARGE): 1.8, ("all_reduce", MEDIUM): 1.5}
NOT_SLOWER_THAN_MPI = (("reduce_scatter", LARGE), ("all_gather", LARGE))

NATIVE_SMALL_TIMES_MPI = {2: 2.0}
NATIVE_SMALL_TIMES_MPI_CROWDED = 1.3
"""Of MPI's time, the native call at most, for two ranks and for more."""

TORCH_ADDS_US = 6.0
"""What ``torch.distributed`` adds to the native call of a small all-reduce, at most, to each rank.

Ranks that share a core add theirs one after the other: the call takes longer by this for each rank of a core.
"""


@dataclass(frozen=True)
class Outcome:
    """One bar on one report; without times where it is about something else.

    Attributes:
        needed, reached: as text, with units.
        value: what was reached, to order several measurements of the bar by.
        measured: how often; then ``value`` is their median.
    """

    bar: str
    world_size: int
    ours_us: float | None
    other_us: float | None
    needed: str
    reached: str
    passes: bool
    value: float
    measured: int = 1

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain data."""
        return asdict(self)


def case_of(bar: str) -> tuple[str, str, str]:
    """The collective, type and size of a bar of ``judge``, as arguments of ``detcomm bench``."""
    collective, dtype, number, unit = bar.replace(",", "").split(" ")[:4]
    return collective, dtype, number + unit[0]


def of_several(outcomes: Sequence[Outcome]) -> Outcome:
    """The median of an odd number of measurements of one bar."""
    middle = sorted(outcomes, key=lambda outcome: outcome.value)[len(outcomes) // 2]
    return replace(middle, measured=len(outcomes))


def judge(report: dict[str, Any]) -> Iterator[Outcome]:
    """Every bar that the rows of a report (see ``Report.to_json``) allow to be judged."""
    rows = {(row["collective"], row["dtype"], row["bytes"], row["contender"]): row for row in report["rows"]}
    world_size = report["world_size"]
    for (collective, dtype, num_bytes, contender), row in rows.items():
        ours = rows.get((collective, dtype, num_bytes, "detcomm"))
        if ours is None or collective not in COLLECTIVES or dtype not in DTYPES:
            continue
        what = f"{collective} {dtype} {_size(num_bytes)}"
        if contender == "gloo" and (least := _against_gloo(num_bytes, world_size)) is not None:
            yield _faster(f"{what} against gloo", world_size, ours, row, least)
        if contender == "mpi" and dtype == "float32":
            if (least := TIMES_FASTER_THAN_MPI.get((collective, num_bytes))) is not None:
                yield _faster(f"{what} against MPI", world_size, ours, row, least)
            if (collective, num_bytes) in NOT_SLOWER_THAN_MPI:
                yield _faster(f"{what} against MPI", world_size, ours, row, 1.0)
        native = rows.get((collective, dtype, num_bytes, "native"))
        if collective == "all_reduce" and dtype == "float32" and num_bytes == SMALL and native is not None:
            if contender == "mpi":
                yield _native_against_mpi(what, world_size, native, row)
            if contender == "native":
                yield _torch_adds(what, world_size, report["machine"]["cores"], ours, native)


def _against_gloo(num_bytes: int, world_size: int) -> float | None:
    if num_bytes == LARGE:
        return LARGE_TIMES_FASTER_THAN_GLOO.get(world_size)
    return TIMES_FASTER_THAN_GLOO.get(num_bytes)


def _faster(bar: str, world_size: int, ours: dict[str, Any], other: dict[str, Any], least: float) -> Outcome:
    ratio = other["times_slower"]
    return Outcome(
        bar,
        world_size,
        ours["median_us"],
        other["median_us"],
        f">= {least:g}x",
        f"{ratio:.2f}x",
        ratio >= least,
        ratio,
    )


def _native_against_mpi(what: str, world_size: int, native: dict[str, Any], mpi: dict[str, Any]) -> Outcome:
    most = NATIVE_SMALL_TIMES_MPI.get(world_size, NATIVE_SMALL_TIMES_MPI_CROWDED)
    ratio = native["times_slower"] / mpi["times_slower"]  # both are relative to detcomm's time
    return Outcome(
        f"{what}, native call against MPI",
        world_size,
        native["median_us"],
        mpi["median_us"],
        f"<= {most:g}x",
        f"{ratio:.2f}x",
        ratio <= most,
        ratio,
    )


def _torch_adds(what: str, world_size: int, cores: int, ours: dict[str, Any], native: dict[str, Any]) -> Outcome:
    added = -native["longer_us"]  # the native call's time less detcomm's, within a round
    of_a_core = max(1.0, world_size / cores)
    most = TORCH_ADDS_US * of_a_core
    crowd = f" ({TORCH_ADDS_US:g} for each of {of_a_core:g} ranks of a core)" if of_a_core > 1 else ""
    return Outcome(
        f"{what}, torch.distributed over the native call",
        world_size,
        ours["median_us"],
        native["median_us"],
        f"<= {most:g} us{crowd}",
        f"{added:.1f} us",
        added <= most,
        added,
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
