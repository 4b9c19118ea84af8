# SPDX-License-Identifier: Apache-2.0
"""Messages between a lab's supervisor and who uses the lab: JSON over a Unix socket, open files with it.

A socket in the file system is reached from every network namespace, so a node can ask as well as the host can.
Knows nothing of what the messages mean.
"""

import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

LONGEST_BYTES = 1 << 20
_MOST_FILES = 3


def connect(path: Path) -> socket.socket:
    """A connection to the supervisor that listens there.

    Raises:
        OSError: nobody does.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST_BYTES)
        connection.connect(str(path))
    except BaseException:
        connection.close()
        raise
    return connection


def listen(path: Path) -> socket.socket:
    """A listening socket at a path that does not exist yet; only its owner may connect."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(64)
    return listener


def send(connection: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    """Send one message, and copies of open files."""
    socket.send_fds(connection, [json.dumps(message).encode()], files)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """One message with its files, which are the receiver's to close; ``None`` if the other end has gone."""
    try:
        data, files, flags, _ = socket.recv_fds(connection, LONGEST_BYTES, _MOST_FILES)
    except ConnectionResetError:
        return None
    if not data:
        close_all(files)
        return None
    if flags & socket.MSG_TRUNC:
        close_all(files)
        raise ValueError(f"a message of more than {LONGEST_BYTES} bytes")
    message: dict[str, Any] = json.loads(data)
    return message, files


def close_all(files: Sequence[int]) -> None:
    """Close open files, whatever their state."""
    for file in files:
        with suppress(OSError):
            os.close(file)
