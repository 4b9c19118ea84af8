# SPDX-License-Identifier: Apache-2.0
"""The suite's conditions, so that they open for detcomm and are tested before ranks are started.

Stock: a test that wants GPUs starts all its ranks, and each finds that there are none and exits. Most of the suite
is such tests. Here the same condition is a plain skip. Only for a machine without GPUs.
"""

import os
import unittest
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal import common_distributed

ASKS_FOR_A_LARGE_WORLD = "asks_for_a_large_world"
_LARGE = 8

Decorator = Callable[[Any], Any]


def open_to(backend: str) -> None:
    """Let a backend of this name into the tests that are for backends in general."""
    features = common_distributed.DistTestCases.backend_feature
    for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
        features[feature] = features[feature] | {backend}


def close_profiling_to(alias: str) -> None:
    """Under an alias, look for no profiler events: they bear the name that C++ gives, and it knows no alias."""
    from torch.testing._internal.distributed import distributed_test

    for name in (
        "PROFILING_SUPPORTED_BACKENDS",
        "CUDA_PROFILING_SUPPORTED_BACKENDS",
        "SEND_RECV_PROFILING_SUPPORTED_BACKENDS",
    ):
        setattr(distributed_test, name, [backend for backend in getattr(distributed_test, name) if backend != alias])


def check_before_ranks_start(world_size: int) -> None:
    """Put plain skips in the place of exits inside the ranks. Before ``distributed_test`` is imported."""
    if not torch.cuda.is_available():
        common_distributed.skip_if_no_gpu = _skip("no_cuda")
        common_distributed.skip_if_lt_x_gpu = _for_gpus
        common_distributed.nccl_skip_if_lt_x_gpu = lambda backend, num: _skip(f"multi-gpu-{num}", backend == "nccl")
        common_distributed.require_n_gpus_for_nccl_backend = lambda num, backend: _skip(
            f"multi-gpu-{num}", backend == "nccl"
        )
    is_mpi = os.environ["BACKEND"] == "mpi"
    small = _skip("small_worldsize", not is_mpi and world_size < _LARGE)
    odd = _skip("odd_worldsize", not is_mpi and world_size % 2 == 1)

    def skip_if_small(test: Any) -> Any:
        setattr(test, ASKS_FOR_A_LARGE_WORLD, True)
        return small(test)

    common_distributed.skip_if_small_worldsize = skip_if_small
    common_distributed.skip_if_odd_worldsize = odd


def _for_gpus(num: int, *, allow_cpu: bool = False) -> Decorator:
    return _skip(f"multi-gpu-{num}", not allow_cpu)


def _skip(reason: str, condition: bool = True) -> Decorator:
    return unittest.skipIf(condition, common_distributed.TEST_SKIPS[reason].message)
