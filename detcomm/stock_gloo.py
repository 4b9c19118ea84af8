# SPDX-License-Identifier: Apache-2.0
"""torch's own gloo process group on a key space of ours: for moving data, never for arithmetic.

Two steps, since they fail differently: the device is local (a wrong interface is this rank's refusal, and can be told
to the others before they wait), the mesh is everybody's. Knows nothing of reductions.
"""

import contextlib
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from detcomm.errors import TransportError, UsageError

INTERFACE_VARIABLES = ("TORCH_GLOO_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_UNUSED_TAG = 0x7FFF_DC00
"""A tag that no message has: see ``unblock``."""


def open_devices() -> list[Any]:
    """The devices of gloo as torch chooses them: the interfaces of ``GLOO_SOCKET_IFNAME``, or that of the hostname.

    Raises:
        UsageError: an interface does not exist, or the hostname does not resolve.
    """
    # Never lazily, whatever TORCH_GLOO_LAZY_INIT says: gloo would ask a store later that is there for the connection.
    names = next((os.environ[name] for name in INTERFACE_VARIABLES if os.environ.get(name)), "")
    try:
        if not names:
            return [ProcessGroupGloo.create_default_device(lazy_init=False)]
        return [ProcessGroupGloo.create_device(interface=name, lazy_init=False) for name in names.split(",")]
    except RuntimeError as error:
        source = f"{INTERFACE_VARIABLES[1]}={names}" if names else "the hostname"
        raise UsageError(f"gloo: no network device from {source}: {_first_line(error)}") from error


def connect_mesh(
    devices: Sequence[Any],
    store: Store,
    prefix: str,
    rank: int,
    world_size: int,
    timeout: timedelta,
    global_ranks: Sequence[int] | None = None,
) -> ProcessGroupGloo:
    """A gloo group of these ranks, connected; all of them call this.

    Args:
        prefix: a key space in the store that no other gloo group of this group uses.
        timeout: for the connection, and for the group's operations afterwards.

    Raises:
        TransportError: the mesh could not be connected.
    """
    # torch's public constructor opens devices of its own; this is what it does next.
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = list(devices)
    options._threads = 2 * len(devices)
    options._timeout = timeout
    if global_ranks is not None:
        options.global_ranks_in_group = list(global_ranks)
    try:
        return ProcessGroupGloo(PrefixStore(prefix, store), rank, world_size, options)
    except RuntimeError as error:
        raise TransportError(
            f"gloo: rank {rank} could not connect to its {world_size - 1} peers: {_first_line(error)}"
        ) from error


def barrier(group: Any) -> None:
    """All ranks of a connected group have come here.

    Raises:
        TransportError: a rank is lost, or did not come within the group's timeout.
    """
    try:
        group.barrier().wait()
    except RuntimeError as error:
        raise TransportError(
            f"gloo: rank {group.rank()} lost its peers as it connected: {_first_line(error)}"
        ) from error


def unblock(group: Any) -> None:
    """Make operations that other threads wait for in this group end with an error now; the group is lost.

    gloo's ``abort`` and ``shutdown`` wake nobody. A receive that times out does: gloo then closes all its pairs.
    """
    for peer in range(group.size()):
        if peer != group.rank():  # all of them, since nothing can be posted to a peer that is lost already
            with contextlib.suppress(RuntimeError):  # meant to fail
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
