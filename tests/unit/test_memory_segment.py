# SPDX-License-Identifier: Apache-2.0
"""Segments within one process: found by address, refused by nonce, and how much memory may be taken."""

import ctypes
import os
from dataclasses import replace
from pathlib import Path

import pytest

from detcomm.errors import TransportError
from detcomm.transports.memory_segment import Address, OwnSegment, available_bytes, open_peer


def test_a_peer_sees_what_the_owner_writes() -> None:
    own = OwnSegment(5000)
    mapping, pidfd = open_peer(1, Address.decode(own.address.encode()))
    try:
        ctypes.memmove(own.mapping.address, b"hello", 5)
        assert ctypes.string_at(mapping.address, 6) == b"hello\0"
        assert own.mapping.num_bytes == mapping.num_bytes >= 5000
    finally:
        os.close(pidfd)
        mapping.close()
        mapping.close()
        own.close()
        own.close()


def test_what_is_not_the_segment_is_refused_and_nothing_stays_open() -> None:
    own, other = OwnSegment(5000), OwnSegment(50_000)
    try:
        before = os.listdir("/proc/self/fd")
        for address, reason in (
            (replace(own.address, nonce="00" * 32), "does not hold its nonce"),
            (replace(own.address, descriptor=other.descriptor), "is not its segment"),
            (replace(own.address, descriptor=9999), "cannot open its segment"),
            (replace(own.address, pid=2**22 - 1), "cannot watch process"),
        ):
            with pytest.raises(TransportError, match=f"rank 3: .*{reason}.*one host, one PID namespace"):
                open_peer(3, address)
        assert os.listdir("/proc/self/fd") == before
    finally:
        own.close()
        other.close()


def test_what_is_no_file_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's terminal would become this process's, and his device might do something."""
    own = OwnSegment(5000)
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *flags: opened.append(path) or real(path, *flags))
    reader, writer = os.pipe()
    master, terminal = os.openpty()
    try:
        for descriptor in (reader, master, terminal):
            with pytest.raises(TransportError, match="is not its segment"):
                open_peer(3, replace(own.address, descriptor=descriptor))
        assert opened == []
        mapping, pidfd = open_peer(3, own.address)
        assert opened == [f"/proc/{os.getpid()}/fd/{own.descriptor}"]  # the control
        mapping.close()
        os.close(pidfd)
    finally:
        for descriptor in (reader, writer, master, terminal):
            os.close(descriptor)
        own.close()


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_memory_is_the_least_of_machine_and_control_groups(tmp_path: Path) -> None:
    assert available_bytes(str(tmp_path)) is None
    _write(tmp_path, {"proc/meminfo": "MemTotal: 9999 kB\nMemAvailable:    4096 kB\n"})
    assert available_bytes(str(tmp_path)) == 4096 << 10
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/memory.max": "3000000\n",
            "sys/fs/cgroup/job/memory.current": "1000000\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/step/memory.current": "5\n",
        },
    )
    assert available_bytes(str(tmp_path)) == 2_000_000


def test_memory_in_control_groups_of_version_1(tmp_path: Path) -> None:
    _write(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 4096 kB\n",
            "proc/self/cgroup": "5:cpu:/a\n4:cpuset,memory:/b\n",
            "sys/fs/cgroup/memory/b/memory.limit_in_bytes": "700\n",
            "sys/fs/cgroup/memory/b/memory.usage_in_bytes": "900\n",
        },
    )
    assert available_bytes(str(tmp_path)) == 0
