# SPDX-License-Identifier: Apache-2.0
"""Trainings with Megatron Core, each on fresh ranks: the layouts, the precisions, and what must not change a bit.

Megatron itself is imported on the ranks only: it is patched to run on a CPU there.
"""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests import launch

_MODULES = (
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
)
"""Seconds of imports, which the server of ranks does once."""

TIMEOUT_S = 300.0

SMALL = ("--steps", "2", "--global-batch", "8")


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks."""

    name: str
    world_size: int
    arguments: tuple[str, ...] = ()

    @property
    def sharded(self) -> bool:
        """Whether the distributed optimizer is used."""
        return "--distributed-optimizer" in self.arguments


@dataclass(frozen=True)
class Variation:
    """What a run does otherwise than the first. None of it is part of the mathematics of the training."""

    name: str
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    moved: bool = False
    """Whether other processes, on two hosts as far as detcomm can see, play the ranks."""


def _layout(name: str, world_size: int, arguments: str = "") -> Layout:
    return Layout(name, world_size, tuple(arguments.split()))


LAYOUTS = (
    _layout("DP4", 4),
    _layout("DP4, distributed optimizer, no clipping", 4, "--distributed-optimizer --clip 0"),
    _layout("DP4, distributed optimizer, exact norm", 4, "--distributed-optimizer --exact-norm"),
    _layout("DP4, overlap", 4, "--overlap-grad-reduce"),
    _layout("TP2", 2, "--tp 2"),
    _layout("TP2, sequence parallel", 2, "--tp 2 --sp"),
    _layout("TP4", 4, "--tp 4"),
    _layout("PP2", 2, "--pp 2"),
    _layout("PP2, 2 virtual stages", 2, "--pp 2 --vpp 2"),
    _layout("EP2, all-to-all", 4, "--ep 2 --num-experts 4"),
    _layout("EP2, all-gather", 4, "--ep 2 --num-experts 4 --dispatcher allgather"),
    _layout("EP4, all-to-all", 4, "--ep 4 --num-experts 4"),
    _layout("EP4, all-gather", 4, "--ep 4 --num-experts 4 --dispatcher allgather"),
    _layout("DP2 x TP2", 4, "--tp 2"),
    _layout("TP2 x PP2", 4, "--tp 2 --pp 2"),
    _layout("DP2 x TP2 x PP2", 8, "--tp 2 --pp 2"),
)

CLIPPED = _layout("DP4, distributed optimizer, Megatron's norm", 4, "--distributed-optimizer")
"""Where the bucket size comes back in, through the norm."""

PRECISIONS = {
    "fp32": (),
    "bf16, fp32 gradients": ("--dtype", "bf16"),
    "bf16, bf16 gradients": ("--dtype", "bf16", "--grad-dtype", "bf16"),
}

# Without overlap Megatron makes one bucket of everything, whatever the bucket size.
_OVERLAP = ("--overlap-grad-reduce",)
AGAIN = Variation("again")
OVERLAP = Variation("overlap", _OVERLAP)
BUCKETS_20000 = Variation("overlap, buckets of 20000", (*_OVERLAP, "--bucket-size", "20000"))
BUCKETS_3000 = Variation("overlap, buckets of 3000", (*_OVERLAP, "--bucket-size", "3000"))
TCP = Variation("one-shot over TCP", env={"DETCOMM_SCHEDULE": "oneshot", "DETCOMM_TRANSPORT": "gloo"})
HALVING = Variation("halving, pieces of 4 KiB", env={"DETCOMM_SCHEDULE": "halving", "DETCOMM_CHUNK_BYTES": "4096"})
MOVED = Variation("other places, two hosts", moved=True)

VARIATIONS = (AGAIN, OVERLAP, BUCKETS_20000, BUCKETS_3000, TCP, HALVING, MOVED)
STOCK_VARIATIONS = (AGAIN, OVERLAP, BUCKETS_20000, BUCKETS_3000, MOVED)

FIRST = Variation("first")


def need_megatron() -> None:
    """Skip the calling test module where Megatron Core is not installed; else get the ranks' imports done once.

    pytest's own process imports nothing of Megatron.
    """
    import pytest  # here, since the scripts do without it

    if not is_installed():
        pytest.skip("megatron-core is not installed", allow_module_level=True)
    preload()


def is_installed() -> bool:
    """Whether there is a Megatron Core to train with; imports nothing of it."""
    return importlib.util.find_spec("megatron") is not None


def preload() -> None:
    """Have the imports done in the server of ranks. Before it starts."""
    launch.preload(*_MODULES)


def train(
    layout: Layout,
    precision: str = "fp32",
    variation: Variation = FIRST,
    *arguments: str,
    backend: str = "detcomm",
    env: Mapping[str, str] | None = None,
    may_start_processes: bool = False,
) -> list[dict[str, Any]]:
    """Train on fresh ranks; what rank 0 reports of each step.

    Args:
        arguments: of ``train.py``, stronger than those of layout, precision and variation.
        may_start_processes: as Megatron does when it writes checkpoints.
    """
    given = [*SMALL, "--backend", backend, *layout.arguments, *PRECISIONS[precision], *variation.arguments]
    if layout.sharded and "--overlap-grad-reduce" in given:
        given.append("--overlap-param-gather")
    common = {**variation.env, **(env or {})}
    environments = [{**common, **place(process, layout.world_size, variation)} for process in range(layout.world_size)]
    results = launch.run(
        layout.world_size,
        rank_of_training,
        [*given, *arguments],
        env=environments,
        timeout_s=TIMEOUT_S,
        daemon=not may_start_processes,
    )
    steps: list[dict[str, Any]] = next(result for result in results if result is not None)
    return steps


def bits(steps: list[dict[str, Any]], *kinds: str) -> list[tuple[str, ...]]:
    """What must be equal of each step: by default gradients, weights and loss."""
    return [tuple(step[kind] for kind in kinds or ("gradients", "weights", "loss")) for step in steps]


def place(process: int, world_size: int, variation: Variation) -> dict[str, str]:
    """Variables that say which rank a process plays, and on which host."""
    if not variation.moved:
        return {}
    rank = (3 * process + 1) % world_size if world_size > 2 else 1 - process
    return {"RANK": str(rank), "DETCOMM_HOST_ID": f"host{process % 2}"}


def rank_of_training(_: int, world_size: int, arguments: list[str]) -> list[dict[str, Any]] | None:
    """One rank of a training; the steps on rank 0."""
    from examples.megatron import train

    steps: list[dict[str, Any]] = train.run(arguments)["steps"]
    return steps if os.environ["RANK"] == "0" else None
