# SPDX-License-Identifier: Apache-2.0
"""A node's first process: it furnishes the node, then does what its supervisor's lines say until they end.

Runs as process 1 of namespaces of its own (network, hostname, processes, mounts, System V memory), so when it ends the
kernel ends everything on the node. Started with its standard input and output as pipes to the supervisor; imports
nothing but the standard library, to start within milliseconds.
"""

import ctypes
import fcntl
import json
import signal
import socket
import struct
import subprocess
import sys

INTERFACE = "eth0"

_SIOCETHTOOL = 0x8946
_TX_CHECKSUM, _SCATTER_GATHER, _TCP_SEGMENTATION, _SEGMENTATION = 0x17, 0x19, 0x1F, 0x24
"""Commands of linux/ethtool.h that switch an offload, in the order in which they may be switched on."""


def main() -> None:
    """Answer ``born``, take the furnishing, answer ``ready``; then lines until the supervisor is gone."""
    # Orphans of the node's commands become children of this process: the kernel buries those that nobody waits for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _answer("born")
    _furnish(**json.loads(sys.stdin.readline()))
    _answer("ready")
    for line in sys.stdin:
        _set_offloads(line.strip() == "offloads on")
        _answer("done")


def _answer(word: str) -> None:
    print(word, flush=True)


def _furnish(name: str, address: str, hosts_file: str) -> None:
    socket.sethostname(name)
    # Shared memory is a host's own; /tmp and all the rest stay shared, as a cluster's network file system is.
    _run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
    _run("mount", "--bind", hosts_file, "/etc/hosts")
    _run("ip", "link", "set", "lo", "up")
    # No addresses but the one given: the kernel would add an IPv6 one, a second later.
    _run("ip", "link", "set", INTERFACE, "addrgenmode", "none")
    _run("ip", "address", "add", f"{address}/24", "dev", INTERFACE)
    _run("ip", "link", "set", INTERFACE, "up")


def _run(*command: str) -> None:
    # SIGCHLD is ignored, so the exit code is lost: what a failed command says is what counts.
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode or done.stdout:
        sys.exit(f"{' '.join(command)}: {done.stdout.decode().strip()}")


def _set_offloads(on: bool) -> None:
    """Without them the frames that leave are of the wire's size and carry their checksums, as on a real wire."""
    commands = (_TX_CHECKSUM, _SCATTER_GATHER, _TCP_SEGMENTATION, _SEGMENTATION)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in commands if on else reversed(commands):
            value = ctypes.create_string_buffer(struct.pack("II", command, int(on)))
            request = struct.pack("16sP", INTERFACE.encode(), ctypes.addressof(value))
            fcntl.ioctl(any_socket, _SIOCETHTOOL, request)


if __name__ == "__main__":
    main()
