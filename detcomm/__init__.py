# SPDX-License-Identifier: Apache-2.0
"""Reductions for torch.distributed whose order of additions is specified.

    import detcomm                                   # registers the backend
    torch.distributed.init_process_group("detcomm")

Importing this package registers the backend where torch is installed, and fills torch's launch variables under MPI and
SLURM launchers. The planner needs no torch.
"""

from importlib.util import find_spec

from detcomm.errors import (
    DetcommError,
    MismatchError,
    NativeError,
    PeerTimeoutError,
    ScheduleError,
    TransportError,
    UnsupportedError,
    UsageError,
)
from detcomm.launcher import fill_environment
from detcomm.options import Options
from detcomm.version import __version__

__all__ = [
    "DetcommError",
    "MismatchError",
    "NativeError",
    "Options",
    "PeerTimeoutError",
    "ScheduleError",
    "TransportError",
    "UnsupportedError",
    "UsageError",
    "__version__",
]

if find_spec("torch") is not None:
    from detcomm import torch_backend
    from detcomm.shared_allocation import shared_empty as shared_empty
    from detcomm.symmetric_pool import symmetric_memory as symmetric_memory

    fill_environment()
    torch_backend.register()
