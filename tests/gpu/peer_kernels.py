# SPDX-License-Identifier: Apache-2.0
"""Ranks that read each other's memory, all in one process on one GPU: each has two streams, pads and a staging area.

    compute-sanitizer --tool racecheck python -m tests.gpu.peer_kernels
    compute-sanitizer --tool memcheck python -m tests.gpu.peer_kernels unordered

No process, no store and no NCCL: programs, native code and kernels alone. Also what the kernels of one rank do to the
memory's bandwidth where nothing else runs.
"""

import ctypes
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.cuda import native
from detcomm.cuda.kernels import THREADS, Kernels, peer_copy_blocks
from detcomm.cuda.libraries import driver
from detcomm.cuda.peer.program import NOTHING, InPlace
from detcomm.cuda.program import Program
from detcomm.fold_spec import FoldSpec
from detcomm.options import Options
from tests import inputs, oracle
from tests.gpu.one_process import OneProcess, begin, zeros
from tests.gpu.speed import median_s

_COUNT = 20_003


def check() -> str:
    """Calls of every way through the kernels, each with the oracle."""
    begin()
    num_calls = 0
    for ranks, given, options, way in _calls():
        tensors = [torch.from_numpy(inputs.bits(one).copy()).cuda() for one in given]
        results = tensors if num_calls % 2 else [torch.zeros_like(tensor) for tensor in tensors]
        ranks.issue(_programs(ranks, options, way), tensors, results)
        torch.cuda.synchronize()
        assert not ranks.words.any(), f"a rank has given up: {ranks.words[:4].tolist()}"
        expected = inputs.bits(oracle.reduce(given, "bfloat16", "sum"))
        for rank, result in enumerate(results):
            assert np.array_equal(result.cpu().numpy(), expected), f"{options} {way} of rank {rank}"
        num_calls += 1
    return f"{num_calls} calls of 2 and 3 ranks in one process have the oracle's bits"


def unordered() -> str:
    """The same calls, each twice, while nobody waits for anybody: for a tool that runs one kernel at a time.

    All that peers might be waited for is told beforehand. So results are not looked at: where each access goes, is.
    """
    begin()
    num_calls = 0
    for ranks, given, options, way in _calls():
        for pads in ranks.pads:
            words = pads.view(torch.int32).view(-1, _Words.NUM)
            words.zero_()
            words[:, _Words.READY : _Words.DONE] = words[:, _Words.SENT : _Words.AWAITED] = _Words.MANY
            words[:, _Words.DONE : _Words.PLACES] = words[:, _Words.CONSUMED : _Words.DEAD] = 2 * _Words.MANY
        tensors = [torch.from_numpy(inputs.bits(one).copy()).cuda() for one in given]
        results = [torch.zeros_like(tensor) for tensor in tensors]
        programs = _programs(ranks, options, way)
        for _ in range(2):  # the second time peers have published where their tensors lie
            ranks.issue(programs, tensors, results)
            torch.cuda.synchronize()
        assert not ranks.words.any(), f"a rank has given up: {ranks.words[:4].tolist()}"
        num_calls += 2
    return f"{num_calls} calls of 2 and 3 ranks in one process, in any order"


class _Words:
    """Where words lie in ``Pad`` of native/kernels/peers.cuh, in units of 4 bytes."""

    READY, DONE, PLACES, SENT, AWAITED, CONSUMED, DEAD, NUM = 0, 16, 32, 160, 176, 192, 208, 256
    MANY = 1 << 29


def _calls() -> Iterator[tuple[OneProcess, list[Any], Options, InPlace | None]]:
    """All-reduces: ranks, contributions, options, and what is read in place; ``None`` for one launch a rank."""
    for world_size in (2, 3):
        ranks = OneProcess(world_size, 4 << 20)
        given = inputs.make("bfloat16", _COUNT, world_size)
        for schedule, piece in (("direct", None), ("oneshot", None), ("direct", 1 << 12), ("halving", 1 << 12)):
            for way in (NOTHING, InPlace(True, True), None):
                if way is not None or piece is None:
                    yield ranks, given, Options(schedule=schedule, chunk_bytes=piece), way


def _programs(ranks: OneProcess, options: Options, way: InPlace | None) -> list[Program]:
    call = Call(Collective.ALL_REDUCE, DType.BFLOAT16, _COUNT, ReduceOp.SUM)
    return ranks.programs(call, options, NOTHING if way is None else way, way is None)


def bandwidth() -> list[str]:
    """Shares of what a device copy reaches: of single kernels, then of all ranks' calls at once. After ``check``."""
    source, target = zeros(1 << 29), zeros(1 << 29)
    copy = 2 * source.numel() / median_s(lambda: target.copy_(source))
    lines = [f"device copy {copy / 1e12:.2f} TB/s"]
    for name, moved, seconds in _single_kernels():
        same = median_s(lambda n=moved // 2: target[:n].copy_(source[:n]))
        lines.append(
            f"{name} alone: {moved / seconds / 1e12:.2f} TB/s, {same / seconds:.2f} of a copy of as many bytes"
        )
    num_bytes = 256 << 20
    for world_size in (2, 4, 8):
        ranks = OneProcess(world_size, 2 * num_bytes + (64 << 20))
        tensors = [zeros(num_bytes) for _ in range(world_size)]
        for name in ("all_reduce", "reduce_scatter", "all_gather"):
            collective = Collective(name)
            shards = None if name == "all_reduce" else (num_bytes // 2 // world_size,) * world_size
            op = ReduceOp.SUM if collective.reduces else None
            call = Call(collective, DType.BFLOAT16, num_bytes // 2, op, shards)
            part = [zeros(num_bytes // world_size) for _ in tensors]
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
    num_bytes = 64 << 20  # of an operand
    for dtype in (DType.BFLOAT16, DType.FLOAT32):
        for num_inputs in (2, 4, 8):
            operands, output = [zeros(num_bytes) for _ in range(num_inputs)], zeros(num_bytes)
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
        pairs = [(zeros(num_bytes), zeros(num_bytes)) for _ in range(num_rows)]
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
    print(unordered() if sys.argv[1:] == ["unordered"] else check())
