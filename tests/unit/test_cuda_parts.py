# SPDX-License-Identifier: Apache-2.0
"""Parts of the CUDA half that need no GPU: blocks, records after a timeout, connecting and its failures, lightness."""

import ctypes
import queue
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from detcomm.coalescing import Block
from detcomm.cuda import nccl as nccl_module
from detcomm.cuda.libraries import Library
from detcomm.cuda.nccl import NcclCommunicator
from detcomm.cuda.scratch import Scratch, largest
from detcomm.cuda.watch import CudaWatch
from detcomm.errors import NativeError, PeerTimeoutError, TransportError, UnsupportedError, UsageError
from detcomm.lazy_cuda import LazyCuda
from detcomm.torch_calls import Batch
from detcomm.work import FinishedWork


def test_a_call_in_a_block_is_issued_at_its_end() -> None:
    block = Block(lambda error: None)
    tensors = [torch.zeros(1), torch.ones(2)]
    works = [block.add_on_gpu("all_reduce", Batch([], [tensor], [tensor]), 1.0) for tensor in tensors]
    with pytest.raises(UsageError, match="inside an open coalescing block"):
        works[0].wait()
    assert not works[0].is_completed()
    issued: list[Batch] = []

    def issue(batch: Batch) -> Any:
        issued.append(batch)
        return FinishedWork(batch.results)

    whole = block.issue_on_gpu(issue)
    assert [list(batch.tensors) for batch in issued] == [tensors]
    assert all(work.wait() and work.result() == whole.result() for work in works)
    assert Block(lambda error: None).issue_on_gpu(issue) is None


def test_a_group_without_a_cuda_half_refuses_and_needs_no_care() -> None:
    cuda = LazyCuda("g", None)
    assert cuda.sequence == 0
    assert cuda.close(0.0)
    cuda.fail(RuntimeError())
    cuda.synchronize(0.0)
    with pytest.raises(UnsupportedError, match="group g takes no CUDA tensors"):
        cuda.reduce("all_reduce", Batch([], [], []), False, 1.0)


class _FakeCommunicator:
    def __init__(self, errors: list[Exception]) -> None:
        self.errors = errors

    def poll(self) -> None:
        if self.errors:
            raise self.errors.pop()


@pytest.mark.parametrize("error", [PeerTimeoutError("late"), ValueError("a bug")])
def test_the_watch_tells_of_any_error_once(error: Exception) -> None:
    told: queue.SimpleQueue[TransportError] = queue.SimpleQueue()
    quiet: Any = _FakeCommunicator([])
    broken: Any = _FakeCommunicator([error])
    CudaWatch.add(quiet, told.put)
    CudaWatch.add(broken, told.put)
    first = told.get(timeout=60)
    assert isinstance(first, TransportError)
    assert str(error) in str(first)
    assert broken not in CudaWatch._watched
    CudaWatch.remove(quiet)
    assert told.empty()
    assert CudaWatch._thread is None


class _FakeNccl:
    """Connects when all ranks have come; then reports what ``state`` says."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size)
        self.state = 0
        self.calls: list[str] = []

    def call(self, name: str, *args: Any) -> None:
        self.calls.append(name)
        if name == "ncclGetUniqueId":
            ctypes.memset(args[0], 0x42, 128)
        elif name == "ncclCommInitRank":
            assert bytes(args[2].internal) == b"\x42" * 128
            try:
                self.barrier.wait(60)
            except threading.BrokenBarrierError as error:
                raise NativeError("the peers did not come") from error
            ctypes.cast(args[0], ctypes.POINTER(ctypes.c_void_p))[0] = 0xC0 + args[3]
        elif name == "ncclCommGetAsyncError":
            ctypes.cast(args[1], ctypes.POINTER(ctypes.c_int))[0] = self.state

    def __getitem__(self, name: str) -> Any:
        return lambda handle: self.calls.append(f"{name} {handle:#x}")

    def describe(self, code: int) -> str:
        return f"error {code}"


def _connect(store: Any, rank: int, world_size: int, failure: Any = None, timeout_s: float = 30.0) -> NcclCommunicator:
    return NcclCommunicator(store, rank, world_size, lambda: None, lambda: failure, timeout_s)


def test_ranks_meet_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, store = _FakeNccl(2), HashStore()
    monkeypatch.setattr(nccl_module, "nccl", lambda: fake)
    made: dict[int, NcclCommunicator] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: made.update({rank: _connect(store, rank, 2)})) for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [made[rank].handle for rank in (0, 1)] == [0xC0, 0xC1]
    made[0].check()
    fake.state = 6
    with pytest.raises(TransportError, match="error 6"):
        made[0].check()
    made[0].abort()
    made[0].abort()
    made[1].close()
    made[1].close()
    assert [call for call in fake.calls if "0x" in call] == ["ncclCommAbort 0xc0", "ncclCommDestroy 0xc1"]
    made[0].check()


def test_scratch_keeps_within_its_bound_even_while_it_grows() -> None:
    class Room:
        def __init__(self, num_bytes: int) -> None:
            self.num_bytes = num_bytes
            rooms.append(self)

        def data_ptr(self) -> int:
            return len(rooms)

    rooms: list[Room] = []
    scratch = Scratch(16 << 20, Room)
    assert [scratch.take(size) for size in (1, 2 << 20, (2 << 20) + 1, 5, largest(16 << 20), 7)] == [1, 1, 2, 2, 2, 2]
    assert sum(room.num_bytes for room in rooms) == 16 << 20
    assert scratch.outgrown() == rooms[:1]
    assert scratch.outgrown() == []
    assert scratch.take(100 << 20) == 3, "a call that needs more has it"
    assert rooms[-1].num_bytes == 100 << 20


def test_errors_have_the_names_of_their_library() -> None:
    assert Library("NCCL", None, {}).describe(5) == "error 5 (ncclInvalidUsage)"
    assert Library("NCCL", None, {}).describe(99) == "error 99"
    assert Library("NVRTC", None, {}).describe(5) == "error 5"


def test_nobody_waits_for_ever_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _FakeNccl(2)
    monkeypatch.setattr(nccl_module, "nccl", lambda: fake)
    with pytest.raises(PeerTimeoutError, match="the 2 ranks of an NCCL communicator did not connect"):
        _connect(HashStore(), 0, 2, timeout_s=0.1)
    with pytest.raises(PeerTimeoutError, match="rank 0 made no NCCL communicator"):
        _connect(HashStore(), 1, 2, timeout_s=0.1)
    with pytest.raises(TransportError, match="rank 0 died"):
        _connect(HashStore(), 1, 2, failure=TransportError("rank 0 died"))
    fake.barrier.abort()


def test_cpu_tensors_import_nothing_of_cuda() -> None:
    program = (
        "import sys, torch, torch.distributed as dist, detcomm\n"
        "dist.init_process_group('detcomm', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(3))\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
        "print([name for name in sys.modules if name.startswith('detcomm.cuda.')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout == "[]\n", done.stderr


FAILING = """
import datetime, types, torch.distributed as dist
from detcomm.cuda.group import CudaGroup
from detcomm.errors import TransportError
from detcomm.options import Options

group = CudaGroup("g", 2, 4, Options(cuda_on_error="{policy}"), 1, dist.HashStore(), datetime.timedelta(1), None, None)
oldest = types.SimpleNamespace(sequence=7, text="all_reduce(sum, float32[8])") if {in_flight} else None
group._communicator = types.SimpleNamespace(
    oldest=oldest, has_captured=False, abort=lambda: print("aborted", flush=True)
)
group.fail(TransportError("rank 1 died"))
print("goes on")
"""


@pytest.mark.parametrize(
    ("policy", "in_flight", "ends"), [("exit", True, True), ("exit", False, False), ("raise", True, False)]
)
def test_a_group_that_fails_with_work_on_the_gpu_ends_the_process(policy: str, in_flight: bool, ends: bool) -> None:
    program = FAILING.format(policy=policy, in_flight=in_flight)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    if not ends:
        assert (done.returncode, done.stdout) == (0, "aborted\ngoes on\n"), done.stderr
        return
    assert done.returncode == -signal.SIGABRT
    assert done.stdout == "", "nothing may go on before the end"
    assert "rank 2 of group g, in collective #7, all_reduce(sum, float32[8]): rank 1 died" in done.stderr
