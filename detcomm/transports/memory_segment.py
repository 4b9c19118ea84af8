# SPDX-License-Identifier: Apache-2.0
"""Memory that the ranks of one host share: anonymous files, found through /proc, mapped, never named.

A rank makes a memfd and tells its peers the process id, the descriptor's number and a nonce; they open
``/proc/PID/fd/N``, which the kernel allows to the same user alone, and look whether the nonce lies there. Nothing has a
name in a file system, so nothing is left behind however a process ends. Knows nothing of groups or collectives.
"""

import ctypes
import fcntl
import json
import mmap
import os
import secrets
import stat
from dataclasses import asdict, dataclass
from typing import Self

from detcomm.errors import TransportError

NONCE_BYTES = 32
PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class Address:
    """Where a peer finds a segment."""

    pid: int
    descriptor: int
    num_bytes: int
    nonce: str

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        return cls(**json.loads(text))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.restype = ctypes.c_int
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_REMOVE = 9
_MAP_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """A shared file mapped into this process. Keeps no descriptor (``mmap.mmap`` would)."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        address = _libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
        if address in (None, _MAP_FAILED):
            code = ctypes.get_errno()
            raise OSError(code, f"cannot map {num_bytes} bytes of shared memory: {os.strerror(code)}")
        self.address: int = address
        self.num_bytes = num_bytes

    def close(self) -> None:
        """Unmap. Idempotent."""
        if self.address:
            _libc.munmap(self.address, self.num_bytes)
            self.address = 0

    def discard(self, offset: int, num_bytes: int) -> None:
        """Give whole pages back; they read as zeros afterwards."""
        _libc.madvise(self.address + offset, num_bytes, _MADV_REMOVE)

    def tail(self, num_bytes: int) -> bytes:
        """The last bytes."""
        return ctypes.string_at(self.address + self.num_bytes - num_bytes, num_bytes)


class OwnSegment:
    """A segment of this process: zeroed memory, with the nonce in an extra last page.

    Pages that are never touched take no memory. ``name`` is what ``/proc/PID/maps`` shows.
    """

    def __init__(self, num_bytes: int, name: str = "detcomm") -> None:
        total = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self.descriptor, 0o600)
            os.ftruncate(self.descriptor, total)
            # Nobody can shrink it, so nobody's access can fault.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            self.mapping = Mapping(self.descriptor, total)
        except BaseException:
            os.close(self.descriptor)
            raise
        ctypes.memmove(self.mapping.address + total - NONCE_BYTES, nonce, NONCE_BYTES)
        self.address = Address(os.getpid(), self.descriptor, total, nonce.hex())

    def seal(self) -> None:
        """Close the descriptor once every peer has opened the segment: nobody can any more. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self.seal()
        self.mapping.close()


def open_peer(rank: int, address: Address) -> tuple[Mapping, int]:
    """Map the segment of ``rank``.

    Returns:
        The mapping, and a pidfd: a descriptor that polls readable when the peer's process has ended.

    Raises:
        TransportError: the segment is not within reach, and why that may be.
    """
    path = f"/proc/{address.pid}/fd/{address.descriptor}"
    try:
        # The pidfd first: if the number meant another process by now, that one would not hold our nonce.
        pidfd = os.pidfd_open(address.pid)
    except OSError as error:
        raise TransportError(f"rank {rank}: cannot watch process {address.pid}: {error.strerror}; {_HINT}") from error
    try:
        # In another PID namespace the path leads to anything of a stranger's: what is no file is not even opened.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise TransportError(f"rank {rank}: {path} is not its segment; {_HINT}")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            if os.fstat(descriptor).st_size != address.num_bytes:
                raise TransportError(f"rank {rank}: {path} is not its segment; {_HINT}")
            mapping = Mapping(descriptor, address.num_bytes)
        finally:
            os.close(descriptor)
        if mapping.tail(NONCE_BYTES) != bytes.fromhex(address.nonce):
            mapping.close()
            raise TransportError(f"rank {rank}: {path} does not hold its nonce; {_HINT}")
    except OSError as error:
        os.close(pidfd)
        raise TransportError(f"rank {rank}: cannot open its segment {path}: {error.strerror}; {_HINT}") from error
    except BaseException:
        os.close(pidfd)
        raise
    return mapping, pidfd


_HINT = "shared memory needs ranks of one host, one PID namespace and one user"


def available_bytes(root: str = "/") -> int | None:
    """Memory that may still be taken here: the least of the machine's and of this process's control groups'.

    ``None`` if nothing can be read. ``root`` is where ``proc`` and ``sys`` are, for tests.
    """
    limits: list[int] = []
    try:
        with open(os.path.join(root, "proc/meminfo")) as lines:
            fields = dict(line.split(":", 1) for line in lines)
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    for maximum, current in _control_groups(root):
        try:
            with open(maximum) as limit_file, open(current) as current_file:
                limit = limit_file.read().strip()
                if limit != "max":
                    limits.append(max(0, int(limit) - int(current_file.read())))
        except (OSError, ValueError):
            continue
    return min(limits) if limits else None


def _control_groups(root: str) -> list[tuple[str, str]]:
    """Files with the limit and the use of each memory control group above this process, versions 2 and 1."""
    files: list[tuple[str, str]] = []
    try:
        with open(os.path.join(root, "proc/self/cgroup")) as lines:
            entries = [line.strip().split(":", 2) for line in lines]
    except OSError:
        return files
    for _, controllers, path in entries:
        if controllers == "":
            mount, names = "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount, names = "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            folder = os.path.join(root, mount, *parts[:depth])
            files.append((os.path.join(folder, names[0]), os.path.join(folder, names[1])))
    return files
