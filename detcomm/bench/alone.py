# SPDX-License-Identifier: Apache-2.0
"""What one rank takes by itself, against its bars: a collective with nobody to talk to, and the folds.

Knows nothing of how the folds are timed: ``scripts/bench_fold`` does that without Python, and writes a file.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from detcomm.bench.bars import Outcome

ALL_REDUCE_US = 8.0
"""For 4 floats. A process group in Python that does nothing takes 2.4 to 2.8, torch's part of it."""

_CALLS_PER_ROUND = 5000


def all_reduce_alone(rounds: int) -> Outcome:
    """``dist.all_reduce`` of 4 floats in a world of one rank, as every rank of a trivial group calls it.

    Starts and ends ``torch.distributed`` in this process.
    """
    dist.init_process_group("detcomm", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = torch.ones(4)
        turns = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            for _ in range(_CALLS_PER_ROUND):
                dist.all_reduce(tensor)
            turns.append((time.perf_counter() - start) / _CALLS_PER_ROUND * 1e6)
    finally:
        dist.destroy_process_group()
    taken = statistics.median(turns[1:])  # the first is a warm-up
    return Outcome(
        "all_reduce of 4 floats",
        1,
        taken,
        None,
        f"<= {ALL_REDUCE_US:g} us",
        f"{taken:.1f} us",
        taken <= ALL_REDUCE_US,
        taken,
    )


def folds(cases: Sequence[dict[str, Any]]) -> Iterator[Outcome]:
    """The bars among the cases of ``scripts/bench_fold``: one thread, 8 operands, against only reading them."""
    for case in cases:
        if case["least_ratio"]:
            needed, reached = f">= {case['least_ratio']:.0%}", f"{case['ratio']:.0%}"
            if case["bound"]:
                reached += f" (side by side without a fold {case['bound']:.0%})"
            bar, value = f"fold of {case['case']}, as a share of a read-only pass", case["ratio"]
            yield Outcome(bar, 1, None, None, needed, reached, case["met"], value)
        elif case["least_gbps"]:
            needed, reached = f">= {case['least_gbps']:g} GB/s", f"{case['fold_gbps']:.1f} GB/s"
            bar, value = f"fold of {case['case']}", case["fold_gbps"]
            yield Outcome(bar, 1, None, None, needed, reached, case["met"], value)
