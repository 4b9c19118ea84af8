# SPDX-License-Identifier: Apache-2.0
"""Memory that ranks map from each other, on a real device: seen by kernels, registered, given back, and with faults."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from detcomm.cuda import libraries
from detcomm.cuda.kernels import Kernels
from detcomm.cuda.peer_memory import ipc
from detcomm.cuda.peer_memory.connect import PROVIDERS, Refusal, connect_peer_memory
from detcomm.cuda.peer_memory.memory import PeerMemory
from detcomm.cuda.peer_memory.sharing import PAD_BYTES
from detcomm.cuda.stock_mover import view
from detcomm.errors import NativeError, PeerTimeoutError
from detcomm.memory import DeviceMemory

STAGING_BYTES = 8 << 20
NUM_CYCLES = 200
VICTIM = 1


class _Rank:
    """One rank, its device, and how it makes memory."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.device = rank % torch.cuda.device_count()
        torch.cuda.set_device(self.device)
        torch.zeros(1, device="cuda")
        dist.init_process_group("gloo")
        self.kernels = Kernels(self.device)
        self.failure: BaseException | None = None
        self._num_made = 0

    def connect(self, provider: str, timeout_s: float = 60.0) -> PeerMemory | Refusal:
        self._num_made += 1
        store = dist.PrefixStore(f"segment {self._num_made}", dist.distributed_c10d._get_default_store())
        return connect_peer_memory(
            store, "check", self.rank, self.world_size, 8, self.device, self.kernels.make_current, STAGING_BYTES,
            lambda: self.failure, timeout_s, [provider],
        )  # fmt: skip

    def memory(self, provider: str) -> PeerMemory:
        made = self.connect(provider)
        assert isinstance(made, PeerMemory), made
        return made

    def words(self, address: int, num_bytes: int) -> torch.Tensor:
        """Memory as 32-bit words that kernels read and write."""
        return view(DeviceMemory(address, num_bytes), torch.device("cuda", self.device)).view(torch.int32)

    def meet(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()


def maps(rank: int, world_size: int) -> list[str]:
    """Both ways to share: kernels read and write what the peers have; 200 cycles leave nothing."""
    own = _Rank(rank, world_size)
    lines = []
    for provider in PROVIDERS:
        own.meet()
        started = time.perf_counter()
        memory = own.memory(provider)
        took_ms = 1e3 * (time.perf_counter() - started)
        _see_each_other(own, memory)
        own.meet()
        assert memory.close(60.0), "a peer did not let go"
        lines.append(f"{provider}: connected in {took_ms:.1f} ms; {_cycles(own, provider)}")
    lines.append(_registered(own))
    lines.append(_beside_a_capture(own))
    return lines


def _see_each_other(own: _Rank, memory: PeerMemory) -> None:
    segment = memory.segment
    pad = own.words(segment.pads[own.rank], PAD_BYTES)
    assert not pad.any(), "a pad is not zero at first"
    own.words(segment.staging[own.rank], STAGING_BYTES).fill_(own.rank + 1)
    own.meet()
    for peer in range(own.world_size):
        seen = own.words(segment.staging[peer], STAGING_BYTES)
        assert bool((seen == peer + 1).all()), f"rank {own.rank} does not see what rank {peer} has"
        own.words(segment.pads[peer], PAD_BYTES)[own.rank] = 1000 * peer + own.rank
    own.meet()
    assert pad[: own.world_size].tolist() == [1000 * own.rank + peer for peer in range(own.world_size)]
    error = own.words(memory.words.device, 256)
    assert not error.any()
    error[memory.words.ERROR] = 77
    torch.cuda.synchronize()
    assert memory.words.error() == 77, "the host does not see a kernel's word"
    memory.words.abort()
    assert int(error[memory.words.ABORT]) == 1, "a kernel does not see the host's word"


def _cycles(own: _Rank, provider: str) -> str:
    """Device memory and descriptors after many groups."""
    left = []
    started = 0.0
    for cycle in range(NUM_CYCLES + 5):
        if cycle == 5:
            own.meet()
            left.append((torch.cuda.mem_get_info()[0], len(os.listdir("/proc/self/fd"))))
            own.meet()
            started = time.perf_counter()
        memory = own.memory(provider)
        assert memory.close(60.0)
    took_ms = 1e3 * (time.perf_counter() - started) / NUM_CYCLES
    own.meet()
    left.append((torch.cuda.mem_get_info()[0], len(os.listdir("/proc/self/fd"))))
    own.meet()
    lost_mib = (left[0][0] - left[1][0]) / 2**20
    assert left[0][1] == left[1][1], f"{left[1][1] - left[0][1]} descriptors are left"
    assert lost_mib < 64, f"{lost_mib:.0f} MiB of the device are lost"  # all ranks and what else runs there
    return f"{NUM_CYCLES} cycles of {took_ms:.1f} ms, {lost_mib:.0f} MiB lost, no descriptor"


def _registered(own: _Rank) -> str:
    """Memory of torch's pools and of its symmetric memory."""
    memory = own.memory("CUDA IPC")
    device = torch.device("cuda", own.device)
    pool = torch.cuda.MemPool()
    symmetric: Any = torch._C._distributed_c10d._SymmetricMemory  # type: ignore[attr-defined]
    with torch.cuda.use_mem_pool(pool):
        tensors = [torch.full((3 << 20,), own.rank, dtype=torch.int32, device=device)]
    tensors.append(symmetric.empty_strided_p2p((1 << 20,), (1,), torch.int32, device))
    tensors[1].fill_(own.rank)
    own.meet()
    reason = memory.register([(tensor.data_ptr(), tensor.nbytes) for tensor in tensors], tensors, 60.0)
    assert not reason, reason
    for number, tensor in enumerate(tensors):
        place = memory.regions.find(tensor.data_ptr() + 400, 4)
        assert place == (1 + number, 400), place
        for peer, base in enumerate(memory.regions.bases(1 + number)):
            if peer != own.rank:
                seen = own.words(base, tensor.nbytes)
                assert bool((seen == peer).all()), f"rank {own.rank} does not see the tensor of rank {peer}"
    own.meet()
    memory.deregister(tensors, 60.0)
    assert memory.regions.find(tensors[0].data_ptr(), 4) is None
    own.meet()
    assert memory.close(60.0)
    return "registered and taken back: memory of a pool, and of torch's symmetric memory"


def _beside_a_capture(own: _Rank) -> str:
    """A further segment while a graph is captured."""
    memory = own.memory("CUDA IPC")
    tensor = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor += 1
        segment = memory.add_segment(1 << 20, 60.0)
        tensor += 1
    graph.replay()
    torch.cuda.synchronize()
    assert bool((tensor == 3).all())
    assert segment.region == 1
    own.meet()
    assert memory.close(60.0)
    return "a segment made while a graph is captured"


def waits(rank: int, world_size: int) -> list[str]:
    """How long each function of the driver waits for a kernel that runs beside it: on the legacy stream, on another."""
    own = _Rank(rank, world_size)
    lines = []
    for name, stream in (("legacy", torch.cuda.default_stream()), ("another", torch.cuda.Stream())):
        own.memory("CUDA IPC").close()
        own.meet()
        longest: dict[str, float] = {}
        restore = _timed(longest)
        try:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000_000)
            started = time.perf_counter()
            memory = own.memory("CUDA IPC")
            connected_s = time.perf_counter() - started
            is_running = not stream.query()
            dist.barrier()
            memory.close(60.0)
        finally:
            restore()
        own.meet()
        told = ", ".join(f"{function} {took_s:.2f}" for function, took_s in longest.items() if took_s > 0.02)
        lines.append(
            f"beside a kernel of about 1 s on {name} stream: connected after {connected_s:.2f} s"
            f"{', while it ran' if is_running else ''}; functions that took long (s): {told or 'none'}"
        )
    return lines


def _timed(longest: dict[str, float]) -> Callable[[], None]:
    library = libraries.driver()
    call = library.call

    def timed(name: str, *args: Any) -> None:
        started = time.perf_counter()
        call(name, *args)
        longest[name] = max(longest.get(name, 0.0), time.perf_counter() - started)

    library.call = timed  # type: ignore[method-assign]
    return lambda: setattr(library, "call", call)


def refused(rank: int, world_size: int) -> str:
    """What one rank cannot, all refuse with one text; and a rank that does not come is named."""
    own = _Rank(rank, world_size)
    original = ipc.open_handle

    def fail(access: Any, handle: str) -> int:
        raise NativeError("no way to this peer")

    if rank == world_size - 1:
        ipc.open_handle = fail
    refusal = own.connect("CUDA IPC")
    ipc.open_handle = original
    told: list[Any] = [None] * world_size
    dist.all_gather_object(told, refusal)
    assert len(set(told)) == 1, told
    assert isinstance(refusal, Refusal)
    assert "no way to this peer" in refusal.reason
    started = time.monotonic()
    if rank != VICTIM:
        try:
            own.connect("CUDA IPC", timeout_s=2.0)
            raise AssertionError("connected without a rank")
        except PeerTimeoutError as error:
            text = f"{error} ({time.monotonic() - started:.1f} s)"
        assert f"rank {VICTIM} did not come" in text, text
    own.meet()
    return f"{refusal.reason}; {text if rank != VICTIM else 'stayed away'}"


def peer_dies(rank: int, world_size: int) -> str:
    """The others' memory stays readable, nobody waits for the dead one without an end, and their processes end."""
    own = _Rank(rank, world_size)
    memory = own.memory("CUDA IPC")
    own.words(memory.segment.staging[rank], STAGING_BYTES).fill_(rank + 1)
    own.meet()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0)
    survivors = [peer for peer in range(world_size) if peer != VICTIM]
    for peer in survivors:
        assert bool((own.words(memory.segment.staging[peer], STAGING_BYTES) == peer + 1).all())
    torch.cuda.synchronize()
    started = time.monotonic()
    was_freed = memory.close(patience_s=1.0)
    assert not was_freed
    return f"survivors still read each other; close returned after {time.monotonic() - started:.1f} s"
