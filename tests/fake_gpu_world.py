# SPDX-License-Identifier: Apache-2.0
"""Fake GPUs of all ranks, each used from a thread of its own: one call on every rank."""

import threading
from typing import Any

import numpy as np
import pytest

from detcomm import tuning
from detcomm.call import Call
from detcomm.collectives import Collective
from detcomm.cuda import bounded_plan as bounded_plan_module
from detcomm.cuda.bounded_plan import bounded_plan
from detcomm.cuda.program import Program, make_program
from detcomm.options import Options
from tests import fake_gpu


def programs(call: Call, world_size: int, options: Options, kernels: fake_gpu.Kernels) -> list[Program]:
    """Of all ranks, none of which shares a host with another."""
    plans = [bounded_plan(call, rank, world_size, options, 1) for rank in range(world_size)]
    return [make_program(plan, kernels.compiler()) for plan in plans]


def run(
    call: Call, options: Options, given: list[Any], in_place: bool = False
) -> tuple[list[Any], list[fake_gpu.FakeGpu], list[Program]]:
    """Outputs, GPUs and programs of all ranks."""
    world_size = len(given)
    kernels, network = fake_gpu.Kernels(), fake_gpu.Network(world_size)
    gpus = [fake_gpu.FakeGpu(rank, network, kernels) for rank in range(world_size)]
    made = programs(call, world_size, options, kernels)
    outputs: list[Any] = []
    memories = []
    for rank in range(world_size):
        memory = given[rank].copy()
        size = call.output_count(rank) * call.dtype.itemsize
        start = call.shard_starts[rank] * call.dtype.itemsize if call.collective is Collective.REDUCE_SCATTER else 0
        outputs.append(memory[start : start + size] if in_place else np.full(size, 0x5A, np.uint8))
        memories.append(memory)
    errors: list[Any] = []

    def work(rank: int) -> None:
        try:
            assert gpus[rank].run(made[rank], memories[rank], outputs[rank]) is None
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return outputs, gpus, made


def gather_results_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """All-reduces of any length take the way of long ones."""
    monkeypatch.setattr(bounded_plan_module, "GATHER_BYTES", 0)
    monkeypatch.setattr(tuning, "ONESHOT_BYTES", 0)
