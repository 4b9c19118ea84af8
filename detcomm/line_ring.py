# SPDX-License-Identifier: Apache-2.0
"""Lifelines between the places of a group: the first rank of each place holds one to that of the next place.

Inside a place every process sees the others' end; the ring shows the end of a place's first process, and so of a
whole place, to two others. Knows nothing of what follows from an end.
"""

import json
import logging
import socket
from collections.abc import Callable
from dataclasses import asdict

from torch.distributed import Store

from detcomm import lifeline, store_access
from detcomm.errors import PeerTimeoutError
from detcomm.lifeline import Endpoint
from detcomm.watched_group import WatchedGroup

_log = logging.getLogger("detcomm")

_PREFIX = "detcomm/endpoint/"

_unreachable: set[str] = set()
"""Names of processes that could not be connected, so that no further group waits for them as long."""


def join_line_ring(
    group: WatchedGroup,
    store: Store,
    listen: Callable[[tuple[str, ...]], Endpoint],
    timeout_s: float,
) -> tuple[socket.socket, str] | None:
    """Publish where this process can be reached and connect to the next place's first process.

    Args:
        store: the group's own key space.
        listen: makes this process accept lines at these addresses.

    Returns:
        The line and the name of the process at its other end; ``None`` for ranks that call nobody.

    Raises:
        PeerTimeoutError: the next place's first rank did not publish its endpoint.
    """
    leaders = group.leaders
    if len(leaders) < 2 or group.rank not in leaders:
        return None
    root = store_access.root_of(store)
    addresses = lifeline.reachable_addresses(getattr(root, "host", None), getattr(root, "port", 0))
    store.set(f"{_PREFIX}{group.rank}", json.dumps(asdict(listen(addresses))))
    place = leaders.index(group.rank)
    if len(leaders) == 2 and place == 1:
        return None  # one line shows both ends
    successor = leaders[(place + 1) % len(leaders)]
    (text,) = store_access.read_all(store, [f"{_PREFIX}{successor}"], timeout_s)
    if text is None:
        raise PeerTimeoutError(f"group {group.name!r}: rank {successor} published no endpoint within {timeout_s:.1f} s")
    process = group.processes[successor]
    fields = json.loads(text)
    endpoint = Endpoint(tuple(fields["addresses"]), fields["port"], fields["secret"])
    if process.name in _unreachable:
        return None
    line = lifeline.connect(endpoint, group.own_process.name, group.key)
    if line is None:
        _unreachable.add(process.name)
        _log.warning(
            "group %r: rank %d cannot connect to rank %d at %s port %d; the end of %s will be noticed by its "
            "messages and by timeouts alone",
            *(group.name, group.rank, successor, ", ".join(endpoint.addresses), endpoint.port, process),
        )
        return None
    return line, process.name
