# SPDX-License-Identifier: Apache-2.0
"""Registers the backend with torch.distributed, and makes its groups.

A group is made in the order in which things can fail: options and devices of this rank, agreement with the others
through the store, then connections.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from detcomm import group_agreement, hosts, stock_gloo, store_access
from detcomm.communicator import Communicator
from detcomm.connect import Site, connect
from detcomm.cuda_process_group import CudaProcessGroup
from detcomm.errors import UsageError
from detcomm.group import Group
from detcomm.group_creation import GroupCreation
from detcomm.options import Options
from detcomm.process_group import BACKEND_NAME, ProcessGroup

DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Make ``"detcomm"`` known to ``init_process_group`` and ``new_group``. Idempotent."""
    if BACKEND_NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND_NAME, create, extended_api=True, devices=DEVICES)


def create(backend_options: Any, pg_options: Any) -> ProcessGroup:
    """What torch calls on every rank of a new group, for the first device that detcomm serves in it.

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
        device=_device_of(backend_options.store),
    )


def make_group(
    store: Any,
    name: str,
    rank: int,
    world_size: int,
    timeout: timedelta,
    pg_options: Any = None,
    device: str = "cpu",
) -> ProcessGroup:
    """Agree on the options, connect, and give the process group; all its ranks call this.

    Args:
        store: of this group alone.
        device: ``cuda`` for a group that leaves CPU tensors to a stock backend.

    Raises:
        UsageError: this rank refuses its options, or a network device.
        MismatchError: the ranks differ, or another rank refuses; every rank names it.
        PeerTimeoutError, TransportError: a rank did not come, or is lost.
    """
    space = store_access.group_key_space(store, rank)
    network: list[Any] = []

    def prepare() -> Options:
        options = options_of(pg_options)
        network.extend(stock_gloo.open_devices())
        return options

    options, introductions = group_agreement.introduce(
        space, rank, world_size, prepare, timeout.total_seconds(), group=name
    )
    limit = options.timeout or timeout
    hosts_by_rank = tuple(introduction.host for introduction in introductions)
    site = Site(space, name, rank, hosts_by_rank, tuple(network), options.chunk_bytes, limit)
    assemble = partial(_assemble, site, options, device)
    group = assemble() if world_size == 1 else _assemble_watched(site, assemble)
    form = ProcessGroup if device == "cpu" else CudaProcessGroup
    return form(store, group, partial(_subgroup, store, device))


def _assemble_watched(site: Site, assemble: Callable[[], Group]) -> Group:
    """Connect under the watch: a rank that fails or dies meanwhile ends it on all ranks."""
    creation = GroupCreation(site.name, site.store, site.rank, site.world_size, site.timeout.total_seconds())
    try:
        group = creation.run(assemble, Group.shutdown)
    except BaseException as error:
        creation.fail(error)
        raise
    group.join(creation)
    return group


def _assemble(site: Site, options: Options, device: str) -> Group:
    """Connect everything that a group needs."""
    inner = stock_gloo.connect_mesh(site.devices, site.store, "movement", site.rank, site.world_size, site.timeout)
    communicator = None
    if device == "cpu":
        block_size = hosts.block_size(site.hosts, options.node_size)
        communicator = Communicator(connect(site, options), options, block_size, site.name)
    return Group(site.name, inner, communicator, options, site.timeout)


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
    store: Any, device: str, name: str, rank: int, world_size: int, timeout: timedelta, pg_options: Any
) -> ProcessGroup:
    space = dist.PrefixStore(f"split/{name}", store)
    return make_group(space, name, rank, world_size, timeout, pg_options, device)


def _device_of(store: Any) -> str:
    """The device for which torch makes a backend: it tells by the prefix of the store alone."""
    key = "detcomm/device"
    store.set(key, "")
    for device in DEVICES:
        # torch's prefix is "cuda/", and a PrefixStore joins with another slash.
        if store.underlying_store.check([f"{device}//{key}"]):
            return device
    return DEVICES[0]
