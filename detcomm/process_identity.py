# SPDX-License-Identifier: Apache-2.0
"""Which process a rank is, so that others can tell its end from its slowness, and from a reuse of its pid."""

import contextlib
import hashlib
import os
from dataclasses import dataclass
from typing import Self

from detcomm.hosts import host_identity, pid_namespace

_STATE, _START_TIME = 0, 19
"""Fields of /proc/PID/stat, counted behind the command's name."""


@dataclass(frozen=True)
class ProcessIdentity:
    """One process, anywhere.

    Args:
        host: see ``hosts.host_identity``.
        pid_namespace: where ``pid`` means something.
        start_time: in clock ticks since boot; tells processes apart that had the same pid. 0 where unknown.
    """

    host: str
    pid_namespace: str
    pid: int
    start_time: int

    @classmethod
    def own(cls) -> Self:
        """This process."""
        pid = os.getpid()
        return cls(host_identity(), pid_namespace(), pid, _start_time(pid))

    @property
    def name(self) -> str:
        """32 characters that name this process and no other one."""
        text = f"{self.host}|{self.pid_namespace}|{self.pid}|{self.start_time}"
        return hashlib.blake2s(text.encode(), digest_size=16).hexdigest()

    @property
    def place(self) -> tuple[str, str]:
        """Processes of one place see each other's end."""
        return self.host, self.pid_namespace

    @property
    def is_running(self) -> bool:
        """Whether the process is there and no zombie; only meaningful in its own place."""
        fields = _stat(self.pid)
        return fields is not None and fields[_STATE] not in "ZX" and int(fields[_START_TIME]) == self.start_time

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger stopped the process; only meaningful in its own place."""
        fields = _stat(self.pid)
        return fields is not None and fields[_STATE] in "Tt" and int(fields[_START_TIME]) == self.start_time

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host.split('/')[1] if self.host.count('/') == 2 else self.host}"

    def open_pidfd(self) -> int:
        """A descriptor that becomes readable when the process ends.

        Raises:
            ProcessLookupError: it has ended already.
            OSError: the kernel has no pidfds.
        """
        descriptor = os.pidfd_open(self.pid)
        # Only now is the pid pinned: what it named before may have been a successor.
        if not self.is_running:
            os.close(descriptor)
            raise ProcessLookupError(f"{self} has ended")
        return descriptor


def _start_time(pid: int) -> int:
    fields = _stat(pid)
    return 0 if fields is None else int(fields[_START_TIME])


def _stat(pid: int) -> list[str] | None:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()
    return None
