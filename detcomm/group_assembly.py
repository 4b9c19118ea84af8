# SPDX-License-Identifier: Apache-2.0
"""Makes a group, in the order in which things can fail.

First this rank's options and network devices, then agreement with the others through the store, then connections.
Knows nothing of the forms in which torch wants a group.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore, Store

from detcomm import group_agreement, hosts, stock_gloo, store_access
from detcomm.communicator import Communicator
from detcomm.connect import Site, candidates, connect
from detcomm.errors import DetcommError, TransportError
from detcomm.group import Group
from detcomm.group_creation import GroupCreation
from detcomm.lazy_communicator import LazyCommunicator
from detcomm.options import Options
from detcomm.watch import Member

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
        space, rank, world_size, prepare, timeout.total_seconds(), group=name, member=Member.own(space).encode()
    )
    limit = options.timeout or timeout
    hosts_by_rank = tuple(introduction.host for introduction in introductions)
    site = Site(space, name, rank, hosts_by_rank, tuple(network), options.chunk_bytes, limit)
    members = [Member.decode(one.member) for one in introductions]
    assemble = partial(_assemble, site, options, device, f"detcomm/group/{members[0].key}")
    return assemble() if world_size == 1 else _assemble_watched(site, members, assemble)


def _assemble_watched(site: Site, members: Sequence[Member], assemble: Callable[[], Group]) -> Group:
    """Connect under the watch: a rank that fails or dies meanwhile ends it on all ranks."""
    creation = GroupCreation(site.name, site.store, site.rank, members, site.timeout.total_seconds())
    try:
        group = creation.run(assemble, Group.shutdown)
    except BaseException as error:
        creation.fail(error)
        raise
    group.join(creation)
    return group


def _assemble(site: Site, options: Options, device: str, key: str) -> Group:
    """Connect what cannot wait: only some ranks may call what moves data. What reduces is connected at first use."""
    communicator = None
    if device == "cpu":
        candidates(options.transport, site.hosts)
        communicator = LazyCommunicator(site.name, _Connector(site, options, key))
    inner = stock_gloo.connect_mesh(site.devices, site.store, "movement", site.rank, site.world_size, site.timeout)
    if site.world_size > 1:
        stock_gloo.barrier(inner)  # or one rank had a group that another one could not make
    return Group(site.name, inner, communicator, options, site.timeout, partial(_make_cuda, site, options))


class _Connector:
    """Connects what reduces, over a connection to the store that nobody waits in, as torch's users do in torch's.

    Args:
        key: names this group among all that live or lived in the store.
    """

    def __init__(self, site: Site, options: Options, key: str) -> None:
        self._site, self._options, self._key = site, options, key
        self._connection: Store | None = None  # kept for the groups that come later

    def __call__(self, timeout_s: float, give_up: Callable[[], bool]) -> Communicator:
        site, options = self._site, self._options
        try:
            store = site.store
            if site.world_size > 1:
                self._connection = store_access.shared_connection(store)
                store = PrefixStore(self._key, self._connection)
            here = replace(site, store=store, timeout=timedelta(seconds=timeout_s), give_up=give_up)
            block_size = hosts.block_size(site.hosts, options.node_size)
            return Communicator(connect(here, options), options, block_size, site.name)
        except DetcommError:
            raise
        except Exception as error:  # of the store, which may have ended: the other ranks must learn of it
            reason = str(error).partition("\n")[0]
            raise TransportError(f"group {site.name}: rank {site.rank} could not connect: {reason}") from error


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
