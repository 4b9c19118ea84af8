# SPDX-License-Identifier: Apache-2.0
"""Registers the backend with torch.distributed, and makes its groups.

A group is made in the order in which things can fail: options and devices of this rank, agreement with the others
through the store, then connections.
"""

from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from detcomm import group_agreement, hosts, stock_gloo, store_access
from detcomm.communicator import Communicator
from detcomm.errors import UsageError
from detcomm.group import Group
from detcomm.options import Options
from detcomm.process_group import BACKEND_NAME, ProcessGroup
from detcomm.transports.gloo import GlooTransport

DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Make ``"detcomm"`` known to ``init_process_group`` and ``new_group``. Idempotent."""
    if BACKEND_NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND_NAME, create, extended_api=True, devices=DEVICES)


def create(backend_options: Any, pg_options: Any) -> ProcessGroup:
    """What torch calls on every rank of a new group.

    Args:
        backend_options: torch's ``_DistributedBackendOptions``: store, rank, size, timeout, name.
        pg_options: ``Options``, or an options object of torch's own backends, or ``None``: from the environment.
    """
    return make_group(
        backend_options.store,
        backend_options.group_id,
        backend_options.group_rank,
        backend_options.group_size,
        backend_options.timeout,
        pg_options,
    )


def make_group(
    store: Any, name: str, rank: int, world_size: int, timeout: timedelta, pg_options: Any = None
) -> ProcessGroup:
    """Agree on the options, connect, and give the process group; all its ranks call this.

    Args:
        store: of this group alone.

    Raises:
        UsageError: this rank refuses its options, or a device.
        MismatchError: the ranks differ, or another rank refuses; every rank names it.
        PeerTimeoutError, TransportError: a rank did not come, or is lost.
    """
    space = store_access.group_key_space(store, rank)
    devices: list[Any] = []

    def prepare() -> Options:
        options = options_of(pg_options)
        devices.extend(stock_gloo.open_devices())
        return options

    options, introductions = group_agreement.introduce(
        space, rank, world_size, prepare, timeout.total_seconds(), group=name
    )
    limit = options.timeout or timeout
    block_size = hosts.block_size([introduction.host for introduction in introductions], options.node_size)
    inner = stock_gloo.connect_mesh(devices, space, "movement", rank, world_size, limit)
    channel = stock_gloo.connect_mesh(devices, space, "reductions", rank, world_size, limit)
    communicator = Communicator(GlooTransport(channel, rank, world_size), options, block_size, name)
    group = Group(communicator, inner, options, limit)
    try:
        group.enrol(space)
    except BaseException:
        group.shutdown()
        raise
    return ProcessGroup(store, group, partial(_subgroup, store))


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


def _subgroup(
    store: Any, name: str, rank: int, world_size: int, timeout: timedelta, pg_options: Any
) -> ProcessGroup:
    return make_group(dist.PrefixStore(f"split/{name}", store), name, rank, world_size, timeout, pg_options)
