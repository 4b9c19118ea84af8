# SPDX-License-Identifier: Apache-2.0
"""Makes a group, in the order in which things can fail.

First this rank's options and network devices, then agreement with the others through the store, then connections.
Knows nothing of the forms in which torch wants a group.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from detcomm import group_agreement, hosts, stock_gloo, store_access
from detcomm.communicator import Communicator
from detcomm.connect import Site, connect
from detcomm.group import Group
from detcomm.group_creation import GroupCreation
from detcomm.options import Options

if TYPE_CHECKING:
    from detcomm.cuda.group import CudaGroup


def make_group(
    store: Any,
    name: str,
    rank: int,
    world_size: int,
    timeout: timedelta,
    make_options: Callable[[], Options],
    device: str,
) -> Group:
    """Agree on the options and connect; all ranks of the group call this.

    Args:
        store: of this group alone.
        make_options: gives the options or refuses; a refusal is told to the other ranks.
        device: ``cuda`` for a group that leaves CPU tensors to a stock backend.

    Raises:
        UsageError: this rank refuses its options, or a network device.
        MismatchError: the ranks differ, or another rank refuses; every rank names it.
        PeerTimeoutError, TransportError: a rank did not come, or is lost.
    """
    space = store_access.group_key_space(store, rank)
    network: list[Any] = []

    def prepare() -> Options:
        options = make_options()
        network.extend(stock_gloo.open_devices())
        return options

    options, introductions = group_agreement.introduce(
        space, rank, world_size, prepare, timeout.total_seconds(), group=name
    )
    limit = options.timeout or timeout
    hosts_by_rank = tuple(introduction.host for introduction in introductions)
    site = Site(space, name, rank, hosts_by_rank, tuple(network), options.chunk_bytes, limit)
    assemble = partial(_assemble, site, options, device)
    return assemble() if world_size == 1 else _assemble_watched(site, assemble)


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
    else:
        # Or a rank that is done early could destroy the group while others still connect. (torch's stub lacks it.)
        inner.barrier().wait()  # type: ignore[attr-defined]
    return Group(site.name, inner, communicator, options, site.timeout, partial(_make_cuda, site, options))


def _make_cuda(site: Site, options: Options, group: Group) -> "CudaGroup":
    from detcomm.cuda.group import CudaGroup  # nothing of CUDA's before the first tensor

    block_size = hosts.block_size(site.hosts, options.node_size)
    return CudaGroup(
        site.name,
        site.rank,
        site.world_size,
        options,
        block_size,
        site.store,
        site.timeout,
        group.lost,
        lambda: group.failure,
    )
