# SPDX-License-Identifier: Apache-2.0
"""Tensors from the NumPy arrays of ``tests/inputs.py`` and back, bit by bit; and a group for the length of a test.

The tests of the torch side run on the form of the backend that the variable ``TESTED_FORM`` names: ``process_group``,
or on torch >= 2.14 ``backend``.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import detcomm
from tests.oracle import Array

PATIENCE = timedelta(seconds=120)


def form_under_test() -> str:
    """The form of the backend that these tests run on."""
    return os.environ.get("TESTED_FORM", "process_group")


def tensor(array: Array, dtype: str) -> torch.Tensor:
    """A fresh tensor with the bits of ``array``."""
    made = torch.empty(array.shape, dtype=getattr(torch, dtype))
    made.reshape(-1).view(torch.uint8).numpy()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return made


def bits(value: torch.Tensor) -> bytes:
    """The memory of a tensor, in the order of its elements."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@contextlib.contextmanager
def group(options: detcomm.Options | None = None, backend: str = "detcomm", **arguments: Any) -> Iterator[Any]:
    """The default group, destroyed at the end."""
    os.environ.setdefault("DETCOMM_FORM", form_under_test())
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch renames collectives from release to release
    dist.init_process_group(backend, pg_options=options, timeout=arguments.pop("timeout", PATIENCE), **arguments)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
