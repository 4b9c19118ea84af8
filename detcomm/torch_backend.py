# SPDX-License-Identifier: Apache-2.0
"""Registers the backend with torch.distributed, and gives torch its groups in one of two forms.

A ``ProcessGroup`` subclass works on every torch that detcomm supports, and is the default. ``DETCOMM_FORM=backend``
chooses a ``Backend`` inside a stock process group instead, which torch >= 2.14 lets Python define: calls pass torch's
dispatcher (profilers see them) and cost 2 us more; but torch 2.14 forgets what a Python work can tell (``backend.py``).
"""

import os
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from detcomm import batched_p2p
from detcomm.backend import Backend
from detcomm.cuda_process_group import CudaProcessGroup
from detcomm.errors import UsageError
from detcomm.group_assembly import make_group
from detcomm.options import Options
from detcomm.process_group import BACKEND_NAME, ProcessGroup

DEVICES = ["cpu", "cuda"]
FORM_VARIABLE = "DETCOMM_FORM"
FORMS = ("process_group", "backend")
_FIRST_WITH_BACKENDS = (2, 14)


def register() -> None:
    """Make ``"detcomm"`` known to ``init_process_group`` and ``new_group``. Idempotent."""
    if BACKEND_NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND_NAME, create, extended_api=True, devices=DEVICES)
        batched_p2p.install()


def create(backend_options: Any, pg_options: Any) -> ProcessGroup | Backend:
    """What torch calls on every rank of a new group, for the first device that detcomm serves in it.

    Args:
        backend_options: torch's ``_DistributedBackendOptions``: store, rank, size, timeout, name.
        pg_options: ``Options``, or an options object of torch's own backends, or ``None``: from the environment.

    Raises:
        DetcommError: see ``make_group``.
    """
    store = backend_options.store
    device = _device_of(store)
    group = make_group(
        store,
        backend_options.group_id,
        backend_options.group_rank,
        backend_options.group_size,
        backend_options.timeout,
        partial(_checked_options, pg_options),
        device,
    )
    if _form() == "backend":
        return Backend(group)
    kind = ProcessGroup if device == "cpu" else CudaProcessGroup
    return kind(store, group, partial(_subgroup, store, device))


def options_of(pg_options: Any) -> Options:
    """The options of a group: those given, whole, or those of the environment.

    Raises:
        UsageError: something else was given, or a variable does not parse.
    """
    if isinstance(pg_options, Options):
        return pg_options
    # Megatron and DeviceMesh hand every backend what is meant for NCCL or gloo: streams and the like, no contract.
    if pg_options is None or type(pg_options).__module__.startswith("torch."):
        return Options.from_environment()
    raise UsageError(f"pg_options: expected detcomm.Options, got {type(pg_options).__name__}")


def _checked_options(pg_options: Any) -> Options:
    _form()
    return options_of(pg_options)


def _form() -> str:
    form = os.environ.get(FORM_VARIABLE) or FORMS[0]
    if form not in FORMS:
        raise UsageError(f"{FORM_VARIABLE}: expected one of {', '.join(FORMS)}, got {form!r}")
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if form == "backend" and version < _FIRST_WITH_BACKENDS:
        raise UsageError(f"{FORM_VARIABLE}=backend needs torch >= 2.14, and this is {torch.__version__}")
    return form


def _subgroup(
    store: Any, device: str, name: str, rank: int, world_size: int, timeout: timedelta, pg_options: Any
) -> ProcessGroup:
    space = dist.PrefixStore(f"split/{name}", store)
    group = make_group(space, name, rank, world_size, timeout, partial(options_of, pg_options), device)
    kind = ProcessGroup if device == "cpu" else CudaProcessGroup
    return kind(space, group, partial(_subgroup, space, device))


def _device_of(store: Any) -> str:
    """The device for which torch makes a backend: it tells by the prefix of the store alone."""
    key = "detcomm/device"
    store.set(key, "")
    for device in DEVICES:
        # torch's prefix is "cuda/", and a PrefixStore joins with another slash.
        if store.underlying_store.check([f"{device}//{key}"]):
            return device
    return DEVICES[0]
