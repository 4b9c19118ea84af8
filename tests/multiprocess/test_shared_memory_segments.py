# SPDX-License-Identifier: Apache-2.0
"""Shared memory between processes: who may see a segment, what stays behind, and ranks that cannot take part."""

import os
from unittest import mock

import pytest
from torch.distributed import PrefixStore

from detcomm import shared_memory_rendezvous
from detcomm.errors import TransportError
from detcomm.shared_memory_rendezvous import meet
from detcomm.transports import memory_segment
from tests import launch
from tests.multiprocess.shared_memory_ranks import PATIENCE_S, Case, connect, connect_store, run_case


def _one_cannot(rank: int, world_size: int, odd: int) -> str:
    if rank == odd:
        os.pidfd_open = _refuse  # type: ignore[assignment]
    before = os.listdir("/proc/self/fd")
    with pytest.raises(TransportError) as raised:
        connect(rank, world_size)
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 2  # the store's connection; the process's heap
    return str(raised.value)


def _refuse(*_: object) -> int:
    raise PermissionError(1, "Operation not permitted")


def test_if_one_rank_cannot_all_say_so_alike() -> None:
    texts = launch.run(3, _one_cannot, 1)
    assert texts == texts[:1] * 3
    assert "does not work between these ranks" in texts[0]
    assert "rank 1: " in texts[0]


def _too_little_memory(rank: int, world_size: int) -> str:
    little = mock.patch.object(shared_memory_rendezvous, "available_bytes", return_value=1 << 20)
    with little, pytest.raises(TransportError) as raised:
        connect(rank, world_size)
    return str(raised.value)


def test_too_little_memory_is_an_error_before_anything_is_taken() -> None:
    for text in launch.run(2, _too_little_memory):
        assert "MiB for 2 ranks" in text
        assert "1 MiB left" in text


def _count_resources() -> tuple[int, int]:
    with open("/proc/self/maps") as lines:
        num_maps = sum("memfd:detcomm " in line for line in lines)
    return len(os.listdir("/proc/self/fd")), num_maps


def _make_and_close(rank: int, world_size: int, num_cycles: int) -> list[tuple[int, int]]:
    store = connect_store()
    counts = []
    for cycle in range(num_cycles):
        transport = meet(PrefixStore(str(cycle), store), rank, world_size, timeout_s=PATIENCE_S)
        run_case(transport, Case("all_reduce", 100))
        transport.close()
        transport.close()
        counts.append(_count_resources())
    return [counts[0], counts[-1]]


def test_nothing_is_left_after_200_groups() -> None:
    for first, last in launch.run(2, _make_and_close, 200):
        assert first == last
        assert last[1] == 0, "segments are still mapped"


def _others_cannot_read(rank: int, world_size: int) -> str:
    own = memory_segment.OwnSegment(4096)
    try:
        path = f"/proc/{os.getpid()}/fd/{own.descriptor}"
        mode = os.stat(path).st_mode & 0o777
        assert mode == 0o600
        with pytest.raises(PermissionError):  # sealed: nobody can shrink it under our feet
            os.ftruncate(own.descriptor, 0)
        child = os.fork()
        if child == 0:
            try:
                os.setgid(65534)
                os.setuid(65534)
                os.close(os.open(path, os.O_RDWR))
                os._exit(1)
            except PermissionError:
                os._exit(0)
            except BaseException:
                os._exit(2)
        return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    finally:
        own.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_a_segment() -> None:
    assert launch.run(1, _others_cannot_read) == ["0"]
