# SPDX-License-Identifier: Apache-2.0
"""Which ranks share a host, and the size of the aligned blocks that follows from it.

Blocks are speed only: they decide which transfers stay inside a host and never enter the bits.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

HOST_ID_VARIABLE = "DETCOMM_HOST_ID"


def host_identity(environ: Mapping[str, str] | None = None) -> str:
    """A text that two processes share if and only if they run on one host and can reach each other there.

    Containers of one machine share its boot id, and network namespaces that stand for nodes share the hostname too;
    so all three count. ``DETCOMM_HOST_ID`` overrides, where even that tells too little.
    """
    environ = os.environ if environ is None else environ
    if explicit := environ.get(HOST_ID_VARIABLE):
        return explicit
    return f"{_boot_id()}/{socket.gethostname()}/{_namespace('net')}"


def pid_namespace() -> str:
    """The namespace in which this process's pid means something."""
    return _namespace("pid")


def block_size(hosts: Sequence[str], node_size: int | None = None) -> int:
    """The largest 2^k such that no aligned block of 2^k ranks crosses a host, in group-rank order.

    Args:
        hosts: each group rank's host.
        node_size: consecutive ranks of one host, where the caller knows better than ``hosts``.

    Returns:
        A power of two; 1 where hosts are interleaved, 2 where each has six ranks. At most the smallest power of two
        that holds the group.
    """
    if node_size is not None:
        hosts = [str(rank // node_size) for rank in range(len(hosts))]
    size = 1
    while size < len(hosts) and _blocks_fit(hosts, 2 * size):
        size *= 2
    return size


def num_hosts(hosts: Sequence[str]) -> int:
    """How many different hosts there are."""
    return len(set(hosts))


def _blocks_fit(hosts: Sequence[str], size: int) -> bool:
    return all(len(set(hosts[start : start + size])) == 1 for start in range(0, len(hosts), size))


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown-boot"


def _namespace(kind: str) -> str:
    try:
        return str(os.stat(f"/proc/self/ns/{kind}").st_ino)
    except OSError:
        return f"unknown-{kind}"
