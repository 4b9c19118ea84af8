# SPDX-License-Identifier: Apache-2.0
"""Shared memory within real limits: PID namespaces, a full /dev/shm, rlimits; and what killed ranks leave."""

import ctypes
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from detcomm.association import TREE
from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.errors import TransportError
from detcomm.transports.memory_segment import OwnSegment
from detcomm.transports.shared_memory import SharedMemoryTransport
from tests import launch
from tests.multiprocess.shared_memory_ranks import PATIENCE_S, connect, connected
from tests.unit.test_float_environment import FE_UPWARD

ROOT = Path(__file__).parents[2]
PROGRAM = str(Path(__file__).with_name("apart_program.py"))
LARGE = Call(Collective.ALL_REDUCE, DType.FLOAT32, 1 << 20, ReduceOp.SUM)
SMALL_SHM = 'mount -t tmpfs -o size=4k tmpfs /dev/shm && exec "$@"'


def _namespaces(*kinds: str) -> list[str]:
    """A command that gives its process namespaces of these kinds; skips where this machine lets nobody have them."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    for user in ([], ["--user", "--map-root-user"]):
        command = ["unshare", *user, *kinds, "--fork", "--kill-child"]
        if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    pytest.skip("this machine gives no namespaces")


def _run_apart(commands: Sequence[Sequence[str]], *args: str, **environment: str) -> list[dict[str, Any]]:
    """The program on a rank for each command, started by it; what the ranks said."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=PATIENCE_S), wait_for_workers=False)
    processes = []
    for rank, command in enumerate(commands):
        own = {"RANK": str(rank), "WORLD_SIZE": str(len(commands)), "MASTER_PORT": str(store.port)}
        variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment, **own}
        run = [*command, sys.executable, PROGRAM, *args]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(run, env=variables, stdout=pipe, stderr=pipe, text=True))
    said = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, errors
            said.append(json.loads(output.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()  # its child ends with it
            process.wait()
    return said


def test_ranks_of_other_pid_namespaces_fall_back_and_say_so_once() -> None:
    said = _run_apart([_namespaces("--pid", "--mount-proc")] * 2, DETCOMM_TRANSPORT="auto")
    assert [(one["transport"], one["first"], one["error"]) for one in said] == [("gloo", 3.0, "")] * 2
    (announced,) = (warning for one in said for warning in one["warnings"])
    assert "transport shared_memory does not work" in announced
    assert "one PID namespace" in announced


def test_shared_memory_by_name_is_an_error_on_ranks_of_other_pid_namespaces() -> None:
    said = _run_apart([_namespaces("--pid", "--mount-proc")] * 2, DETCOMM_TRANSPORT="shared_memory")
    assert [(one["transport"], one["warnings"]) for one in said] == [("", [])] * 2
    assert all(re.match("TransportError.*transport shared_memory.*one PID namespace", one["error"]) for one in said)


@pytest.mark.parametrize("transport", ["auto", "shared_memory", "gloo"])
def test_in_one_pid_namespace_the_variable_decides(transport: str) -> None:
    """The control: the same program, and what was a fallback above."""
    said = _run_apart([[], [], []], DETCOMM_TRANSPORT=transport)
    name = "gloo" if transport == "gloo" else "shared_memory"
    assert said == [{"transport": name, "first": 7.0, "error": "", "warnings": []}] * 3


def test_a_full_dev_shm_is_in_nobodys_way() -> None:
    command = [*_namespaces("--mount"), "sh", "-c", SMALL_SHM, "sh"]
    said = _run_apart([command, command], "full", DETCOMM_TRANSPORT="auto")
    assert said == [{"transport": "shared_memory", "first": 3.0, "error": "", "warnings": []}] * 2


def _limit(kind: str) -> tuple[int, int]:
    """Which limit, and one that is reached."""
    if kind == "descriptors":
        os.close(first_free := os.dup(0))
        return resource.RLIMIT_NOFILE, first_free
    if kind == "file size":
        return resource.RLIMIT_FSIZE, 4096
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return resource.RLIMIT_AS, pages * resource.getpagesize()


def _connect_within(rank: int, world_size: int, odd: int, kind: str) -> str:
    make = OwnSegment.__init__

    def within(self: OwnSegment, num_bytes: int, name: str = "detcomm") -> None:
        which, value = _limit(kind)
        before = resource.getrlimit(which)
        resource.setrlimit(which, (min(value, before[1]) if before[1] >= 0 else value, before[1]))
        try:
            make(self, num_bytes, name)
        finally:
            resource.setrlimit(which, before)

    if rank == odd:
        OwnSegment.__init__ = within  # type: ignore[method-assign]
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError) as raised:
        connect(rank, world_size)
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # the store's connection; the process's heap
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("descriptors", "Too many open files"), ("file size", "File too large"), ("address space", "Cannot allocate")],
)
def test_a_limit_of_one_rank_is_named_on_all(kind: str, reason: str) -> None:
    (text,) = set(launch.run(3, _connect_within, 1, kind))
    assert re.search(rf"does not work between these ranks: rank 1: .*{reason}", text), text


def _reduce(transport: SharedMemoryTransport) -> None:
    data = np.ones(4 * LARGE.count, np.uint8)
    assert transport.native_collectives is not None
    transport.native_collectives.run(LARGE, TREE, "float32", data, data, timeout_s=PATIENCE_S)


def _reduce_forever(transport: SharedMemoryTransport) -> None:
    while True:
        _reduce(transport)


def _mapped() -> list[str]:
    """The inodes of the segments of groups that this process has mapped; heaps of shared tensors do not count."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[4] for line in lines if re.search(r"memfd:detcomm(?!-heap)", line)]


def _processes_that_map(inodes: set[str]) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = path.read_text().splitlines()
        except (OSError, ProcessLookupError):
            continue
        if any("memfd:detcomm" in line and line.split()[4] in inodes for line in lines):
            found.append(path.parent.name)
    return found


def _be_killed(rank: int, world_size: int, victims: int, folder: str) -> tuple[int, int, list[str]]:
    """The first ranks kill themselves; descriptors before and after, and segments that are mapped after."""
    before = len(os.listdir("/proc/self/fd"))
    transport = connect(rank, world_size)
    _reduce(transport)
    inodes = _mapped()
    assert len(inodes) == world_size
    assert str(os.getpid()) in _processes_that_map(set(inodes))  # the control: what is there is found
    Path(folder, str(rank)).write_text("\n".join(inodes))
    _reduce(transport)  # all have written
    if rank < victims:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransportError, match="lost rank"):
        _reduce_forever(transport)
    transport.close()
    return before, len(os.listdir("/proc/self/fd")), _mapped()


@pytest.mark.parametrize("victims", [1, 3])
def test_killed_ranks_leave_nothing(victims: int, tmp_path: Path) -> None:
    named = set(os.listdir("/dev/shm"))
    results = launch.run(3, _be_killed, victims, str(tmp_path), may_die=True)
    assert results[:victims] == [launch.Died(-signal.SIGKILL)] * victims
    for before, after, mapped in results[victims:]:
        assert after <= before + 2  # the store's connection; the process's heap
        assert mapped == []
    inodes = {inode for path in tmp_path.iterdir() for inode in path.read_text().split()}
    assert len(inodes) == 3
    assert _processes_that_map(inodes) == []
    assert not [name for name in set(os.listdir("/dev/shm")) - named if "detcomm" in name]


def _reduce_while_flushing(rank: int, world_size: int) -> bytes:
    """A thread that flushes subnormals and rounds upwards: no sum of ours does, and both come back after the call."""
    small = np.float32(2.0**-25)
    data = np.array([3 * 2.0**-149, 1.0 if rank == 0 else small], np.float32)
    call = Call(Collective.ALL_REDUCE, DType.FLOAT32, 2, ReduceOp.SUM)
    libm = ctypes.CDLL(None)
    upward = FE_UPWARD[os.uname().machine]

    def is_odd() -> bool:
        return libm.fegetround() == upward and bool((np.ones(1, np.float32) + small)[0] > 1)

    with connected(rank, world_size) as transport:
        collectives = transport.native_collectives
        assert collectives is not None
        assert torch.set_flush_denormal(True)
        libm.fesetround(upward)
        try:
            before = is_odd()  # the control: here such sums come out otherwise
            memory = data.view(np.uint8)
            collectives.run(call, TREE, "float32", memory, memory, timeout_s=PATIENCE_S)
            after = is_odd()
            flushes = bool((np.array([1e-40], np.float32) * np.float32(1))[0] == 0)
        finally:
            libm.fesetround(0)
            torch.set_flush_denormal(False)
    assert (before, after, flushes) == (True, True, True)
    return data.tobytes()


@pytest.mark.skipif(os.uname().machine not in FE_UPWARD, reason="FE_UPWARD of this processor is not known here")
def test_the_rounding_of_a_rank_s_thread_reaches_no_sum() -> None:
    wanted = np.array([9 * 2.0**-149, 1.0], np.float32)
    assert launch.run(3, _reduce_while_flushing) == [wanted.tobytes()] * 3
