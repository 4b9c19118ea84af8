# SPDX-License-Identifier: Apache-2.0
"""Ranks that read each other's memory, all in one process on one GPU: each has two streams, pads and a staging area.

    compute-sanitizer --tool memcheck python -m tests.gpu.peer_kernels

No process, no store and no NCCL: programs, native code and kernels alone. Also what the kernels of one rank do to the
memory's bandwidth where nothing else runs.
"""

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.cuda import native
from detcomm.cuda.bounded_plan import bounded_peer_plans
from detcomm.cuda.kernels import THREADS, Kernels, copy_blocks, peer_copy_blocks
from detcomm.cuda.libraries import driver
from detcomm.cuda.peer.fused import MOST_BLOCKS, SLICE_BYTES, blocks_for, forms_of, make_fused_program
from detcomm.cuda.peer.layout import Layout
from detcomm.cuda.peer.path import PAD_BYTES
from detcomm.cuda.peer.program import NOTHING, InPlace, make_peer_program
from detcomm.cuda.program import Compiler, Program
from detcomm.cuda.stream_order import NUM_EVENTS
from detcomm.fold_spec import FoldSpec
from detcomm.options import Options
from tests import inputs, oracle
from tests.gpu.speed import median_s

_PATIENCE_NS = 20_000_000_000

_ENVIRONMENT = {
    # One process issues for all ranks. With fewer queues than streams, what waits on one stream of a queue keeps back
    # what it waits for on another. Where each rank has a process, one queue is enough: the stage streams-1-peer.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Loading a kernel at its first launch waits for the kernels of all streams.
    "CUDA_MODULE_LOADING": "EAGER",
}


def _begin() -> None:
    """Before anything else of CUDA in this process."""
    assert not torch.cuda.is_initialized(), "the environment comes too late"
    os.environ.update(_ENVIRONMENT)
    torch.cuda.set_device(0)


class OneProcess:
    """All ranks on the current device."""

    def __init__(self, world_size: int, staging_bytes: int) -> None:
        self.world_size, self.room = world_size, staging_bytes
        self.kernels = Kernels(torch.cuda.current_device())
        kernels = self.kernels
        self.compiler = Compiler(
            kernels.fold, kernels.fold_blocks, kernels.copy, copy_blocks, kernels.peer_fold, kernels.peer_copy,
            peer_copy_blocks, kernels.sync, kernels.fused,
        )  # fmt: skip
        self.pads = [_zeros(64 << 10) for _ in range(world_size)]
        self.staging = [_zeros(staging_bytes + MOST_BLOCKS * SLICE_BYTES) for _ in range(world_size)]
        self.words = torch.zeros(64, dtype=torch.int32).pin_memory()
        self.tables = [_zeros(8 * 256 * world_size) for _ in range(world_size)]
        self.peers = [self._peers(rank) for rank in range(world_size)]
        make_stream: Any = torch.cuda.Stream
        self.streams = [[make_stream() for _ in range(2)] for _ in range(world_size)]
        self.events = [(ctypes.c_void_p * NUM_EVENTS)(*[_event() for _ in range(NUM_EVENTS)]) for _ in self.peers]
        self.table = native.functions_of(driver(), None)

    def programs(self, call: Call, options: Options, in_place: InPlace = NOTHING, fuses: bool = False) -> list[Program]:
        """Of all ranks."""
        ranks = range(self.world_size)
        plans = bounded_peer_plans(call, ranks, self.world_size, options, 16, self.room)
        forms = forms_of(plans)
        if fuses:
            assert forms is not None
            num_blocks = blocks_for(call.count * call.dtype.itemsize, MOST_BLOCKS)
            return [make_fused_program(forms, rank, self.compiler, num_blocks) for rank in ranks]
        layouts = {rank: Layout(plan, set(ranks) - {rank}) for rank, plan in plans.items()}
        return [make_peer_program(plans[rank], layouts, self.compiler, in_place) for rank in ranks]

    def issue(self, programs: list[Program], given: list[Any], results: list[Any]) -> None:
        """On every rank, once peers know where its tensors lie."""
        for rank in range(self.world_size):
            peers = self.peers[rank]
            for buffer, tensor in enumerate((given[rank], results[rank])):  # region 1 is the input, region 2 the output
                peers.places[buffer] = (buffer + 1) << 48
                for table in self.tables:
                    table.view(torch.int64)[256 * rank + buffer + 1] = tensor.data_ptr()
        torch.cuda.synchronize()
        self.issue_only(programs, given, results)

    def issue_only(self, programs: list[Program], given: list[Any], results: list[Any]) -> None:
        """The same for tensors of the call before; the host waits for nothing."""
        for rank, program in enumerate(programs):
            peers = self.peers[rank]
            call = native.CCall(
                streams=tuple(stream.cuda_stream for stream in self.streams[rank]),
                events=ctypes.addressof(self.events[rank]),
                buffers=(given[rank].data_ptr(), results[rank].data_ptr(), peers.staging[rank]),
                context=self.kernels.context,
                peers=ctypes.addressof(peers),
            )
            failure = native.CFailure()
            status = native.library().dc_cuda_issue(
                program.address, ctypes.byref(self.table), ctypes.byref(call), ctypes.byref(failure)
            )
            assert status == 0, f"{failure.function}: {failure.code}"

    def _peers(self, rank: int) -> native.CPeers:
        peers = native.CPeers(
            table=self.tables[rank].data_ptr(), words=self.words.data_ptr(), patience_ns=_PATIENCE_NS,
            fused_offset=self.room, slice_bytes=SLICE_BYTES, pad_bytes=PAD_BYTES, index=rank,
            num_peers=self.world_size,
        )  # fmt: skip
        for index in range(self.world_size):
            peers.staging[index], peers.pads[index] = self.staging[index].data_ptr(), self.pads[index].data_ptr()
        return peers


def _zeros(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")


def _event() -> int:
    handle = ctypes.c_void_p()
    driver().call("cuEventCreate", ctypes.byref(handle), 2)
    assert handle.value is not None
    return handle.value


def check() -> str:
    """Calls of every way through the kernels, each with the oracle."""
    _begin()
    num_calls = 0
    for world_size in (2, 3):
        ranks = OneProcess(world_size, 4 << 20)
        count = 20_003
        given = inputs.make("bfloat16", count, world_size)
        expected = inputs.bits(oracle.reduce(given, "bfloat16", "sum"))
        call = Call(Collective.ALL_REDUCE, DType.BFLOAT16, count, ReduceOp.SUM)
        for schedule, piece in (("direct", None), ("oneshot", None), ("direct", 1 << 12), ("halving", 1 << 12)):
            options = Options(schedule=schedule, chunk_bytes=piece)
            for way in (NOTHING, InPlace(True, True), "fused"):
                if way == "fused" and piece is not None:
                    continue
                in_place = NOTHING if isinstance(way, str) else way
                programs = ranks.programs(call, options, in_place, way == "fused")
                tensors = [torch.from_numpy(inputs.bits(one).copy()).cuda() for one in given]
                results = tensors if num_calls % 2 else [torch.zeros_like(tensor) for tensor in tensors]
                ranks.issue(programs, tensors, results)
                torch.cuda.synchronize()
                assert not ranks.words.any(), f"a rank has given up: {ranks.words[:4].tolist()}"
                for rank, result in enumerate(results):
                    assert np.array_equal(result.cpu().numpy(), expected), f"{options} {way} of rank {rank}"
                num_calls += 1
    return f"{num_calls} calls of 2 and 3 ranks in one process have the oracle's bits"


def bandwidth() -> list[str]:
    """Shares of what a device copy reaches: of single kernels, then of all ranks' calls at once. After ``check``."""
    source, target = _zeros(1 << 28), _zeros(1 << 28)
    copy = 2 * source.numel() / median_s(lambda: target.copy_(source))
    lines = [f"device copy {copy / 1e12:.2f} TB/s"]
    for name, moved, seconds in _single_kernels():
        lines.append(f"{name} alone: {moved / seconds / 1e12:.2f} TB/s, {moved / seconds / copy:.2f} of the copy")
    num_bytes = 256 << 20
    for world_size in (2, 4, 8):
        ranks = OneProcess(world_size, 2 * num_bytes + (64 << 20))
        tensors = [_zeros(num_bytes) for _ in range(world_size)]
        for name in ("all_reduce", "reduce_scatter", "all_gather"):
            collective = Collective(name)
            shards = None if name == "all_reduce" else (num_bytes // 2 // world_size,) * world_size
            call = Call(collective, DType.BFLOAT16, num_bytes // 2, ReduceOp.SUM, shards)
            part = [_zeros(num_bytes // world_size) for _ in tensors]
            given, results = {
                "all_reduce": (tensors, tensors), "reduce_scatter": (tensors, part), "all_gather": (part, tensors)
            }[name]  # fmt: skip
            for in_place, piece in ((NOTHING, 1 << 30), (NOTHING, 16 << 20), (InPlace(True, True), 1 << 30)):
                programs = ranks.programs(call, Options(schedule="direct", chunk_bytes=piece), in_place)
                ranks.issue(programs, given, results)
                seconds = min(_seconds(ranks, programs, given, results) for _ in range(7))
                moved = sum(program.counts.folded_bytes + program.counts.copied_bytes for program in programs)
                where = "read in place" if in_place.input else f"staged in pieces of {min(piece, num_bytes) >> 20} MiB"
                lines.append(
                    f"{name} x{world_size}, {where}: {moved / seconds / 1e12:.2f} TB/s, "
                    f"{moved / seconds / copy:.2f} of the copy, {seconds * 1e3:.2f} ms"
                )
        for num_bytes_short in (64 << 10, 1 << 20):
            call = Call(Collective.ALL_REDUCE, DType.BFLOAT16, num_bytes_short // 2, ReduceOp.SUM)
            for schedule in ("oneshot", "direct"):
                programs = ranks.programs(call, Options(schedule=schedule), NOTHING, True)
                ranks.issue(programs, tensors, tensors)
                seconds = min(_seconds(ranks, programs, tensors, tensors) for _ in range(7))
                moved = sum(program.counts.folded_bytes + program.counts.copied_bytes for program in programs)
                same = median_s(lambda n=moved // 2: target[:n].copy_(source[:n]))
                lines.append(
                    f"{schedule} x{world_size} of {num_bytes_short >> 10} KiB, one launch: {seconds * 1e6:.1f} us; "
                    f"a copy of the {moved / 2**20:.1f} MiB that it moves {same * 1e6:.1f} us"
                )
    return lines


class _Source(ctypes.Structure):
    """``Source`` of native/kernels/peers.cuh."""

    _fields_ = (("address", ctypes.c_uint64), ("place", ctypes.c_uint64), ("offset", ctypes.c_uint64))


class _Copies(ctypes.Structure):
    """``Copies`` of native/kernels/copy.cu."""

    _fields_ = (
        ("src", _Source * native.MAX_COPIES),
        ("dst", ctypes.c_uint64 * native.MAX_COPIES),
        ("num_bytes", ctypes.c_uint64 * native.MAX_COPIES),
    )


def _single_kernels() -> Iterator[tuple[str, int, float]]:
    """What the two halves of a long call are: name, bytes read and written, seconds. Nobody is waited for."""
    kernels = Kernels(torch.cuda.current_device())
    stream = torch.cuda.current_stream().cuda_stream
    num_bytes = 32 << 20  # of an operand: a rank's part of 256 MiB on 8 ranks
    for dtype in (DType.BFLOAT16, DType.FLOAT32):
        for num_inputs in (2, 4, 8):
            operands, output = [_zeros(num_bytes) for _ in range(num_inputs)], _zeros(num_bytes)
            spec = FoldSpec(ReduceOp.SUM, dtype, "float32", "tree", (True,) * num_inputs, True)
            kernel, count = kernels.peer_fold(spec), num_bytes // dtype.itemsize
            blocks = kernels.fold_blocks(count, dtype.itemsize)
            arguments: list[Any] = [
                (_Source * num_inputs)(*[_Source(operand.data_ptr(), 0, 0) for operand in operands]),
                ctypes.c_uint64(output.data_ptr()), ctypes.c_uint64(count), ctypes.c_uint64(1),
            ]  # fmt: skip
            seconds = median_s(lambda k=kernel, b=blocks, a=arguments: kernels.launch(k, b, stream, *a))
            yield f"fold of {num_inputs} peers' {dtype.value}", (num_inputs + 1) * num_bytes, seconds
    for num_rows in (1, 7):
        pairs = [(_zeros(num_bytes), _zeros(num_bytes)) for _ in range(num_rows)]
        copies = _Copies()
        for row, (src, dst) in enumerate(pairs):
            copies.src[row] = _Source(src.data_ptr(), 0, 0)
            copies.dst[row], copies.num_bytes[row] = dst.data_ptr(), num_bytes
        kernel, blocks = kernels.peer_copy(), peer_copy_blocks(num_bytes)
        seconds = median_s(lambda k=kernel, b=blocks, n=num_rows, c=copies: _launch_rows(k, b, n, stream, c))
        yield f"copies from {num_rows} peers", 2 * num_rows * num_bytes, seconds


def _launch_rows(kernel: int, num_blocks: int, num_rows: int, stream: int, copies: _Copies) -> None:
    addresses = (ctypes.c_void_p * 1)(ctypes.addressof(copies))
    driver().call("cuLaunchKernel", kernel, num_blocks, num_rows, 1, THREADS, 1, 1, 0, stream, addresses, None)


def _seconds(ranks: OneProcess, programs: list[Program], given: list[Any], results: list[Any]) -> float:
    """From the first operation of the first rank to the last of the last; all are issued while the GPU is kept busy."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    holder = torch.cuda.current_stream()
    torch.cuda._sleep(40_000_000)  # so that all is issued when it begins
    begin.record(holder)
    for streams in ranks.streams:
        for stream in streams:
            stream.wait_event(begin)
    ranks.issue_only(programs, given, results)
    for streams in ranks.streams:
        holder.wait_stream(streams[0])
    end.record(holder)
    torch.cuda.synchronize()
    assert not ranks.words.any()
    return begin.elapsed_time(end) / 1e3


if __name__ == "__main__":
    print(check())
