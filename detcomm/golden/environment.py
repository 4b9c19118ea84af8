# SPDX-License-Identifier: Apache-2.0
"""Where a run was recorded: versions, device, groups, and the variables that bear on the bits.

No times and no host names, so that two equal runs write equal files.
"""

import os
import platform
from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist

from detcomm.backend import Backend
from detcomm.options import Options
from detcomm.process_group import ProcessGroup
from detcomm.version import __version__

_PREFIXES = ("DETCOMM_", "NCCL_", "NVTE_", "GLOO_", "MKL_", "CUBLAS_", "CUDNN_")
_NAMES = ("ATEN_CPU_CAPABILITY", "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS", "PYTHONHASHSEED")
_NOT = ("DETCOMM_GOLDEN_FILE", "DETCOMM_STARTED_BY", "DETCOMM_NATIVE_LIBRARY")


def describe(group: dist.ProcessGroup | None, devices: Iterable[torch.device]) -> dict[str, Any]:
    """The environment of this process, as JSON.

    Args:
        group: the default group, or ``None``.
        devices: on which the recorded tensors lie.
    """
    devices = list(devices)
    types = {device.type for device in devices}
    return {
        "numerics": _numerics(group, "cpu" if types == {"cpu"} else min(types - {"cpu"}, default="cpu")),
        "world_size": 1 if group is None else dist.get_world_size(group),
        "device": sorted({_device_name(device) for device in devices}),
        "detcomm": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "num_threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "options": _options(group),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if (name.startswith(_PREFIXES) or name in _NAMES) and name not in _NOT
        },
    }


def _numerics(group: dist.ProcessGroup | None, device: str) -> list[str]:
    """What reduces tensors of ``device`` in this rank's groups, each once: ``detcomm tree/1:float32``, ``nccl``."""
    if group is None:
        return []
    groups = list(dist.distributed_c10d._world.pg_map)
    backends = (backend for each in [group, *groups] for own, backend in _backends(each) if own == device)
    return sorted({_reducer(backend) for backend in backends})


def _reducer(backend: Any) -> str:
    options = _detcomm_options(backend)
    return f"{backend.name()}" + (f" {options.numerics_id}" if options else "")


def _options(group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Detcomm's options in the default group, as far as they are not the defaults."""
    for _, backend in [] if group is None else _backends(group):
        if options := _detcomm_options(backend):
            given = attrs.asdict(
                options, filter=lambda field, value: value != field.default and field.name != "timeout"
            )
            return dict(sorted(given.items()))
    return {}


def _backends(group: dist.ProcessGroup) -> list[tuple[str, Any]]:
    """The devices that a group serves, and what serves each."""
    devices = sorted(group._device_types, key=str)
    if isinstance(group, ProcessGroup):
        return [(device.type, group) for device in devices]
    return [(device.type, group._get_backend(device)) for device in devices]


def _detcomm_options(backend: Any) -> Options | None:
    return backend._group.options if isinstance(backend, ProcessGroup | Backend) else None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else device.type
