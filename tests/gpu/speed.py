# SPDX-License-Identifier: Apache-2.0
"""Time of detcomm's collectives beside stock NCCL's, interleaved in one process; of the fold kernel beside a copy."""

import ctypes
import statistics
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from detcomm.collectives import DType, ReduceOp
from detcomm.cuda.device import kernels_of
from detcomm.fold_spec import FoldSpec
from tests.gpu.collectives import start

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)


def folds(rank: int, world_size: int) -> list[str]:
    """Bandwidth of the fold kernel, as a share of a device copy's."""
    torch.cuda.set_device(0)
    kernels = kernels_of(0)
    stream = torch.cuda.current_stream().cuda_stream
    num_bytes = 128 << 20
    src, dst = (torch.empty(num_bytes * 4, dtype=torch.uint8, device="cuda").fill_(k) for k in (1, 2))
    copy = 2 * src.numel() / median_s(lambda: dst.copy_(src))
    lines = [f"device copy {copy / 1e12:.2f} TB/s"]
    for dtype in (DType.BFLOAT16, DType.FLOAT32):
        for num_inputs in (2, 3, 4, 8):
            operands = [torch.randn(num_bytes // 4, device="cuda").view(torch.uint8) for _ in range(num_inputs)]
            output = torch.empty_like(operands[0])
            spec = FoldSpec(ReduceOp.SUM, dtype, "float32", "tree", (True,) * num_inputs, True)
            count = num_bytes // dtype.itemsize
            kernel, blocks = kernels.fold(spec), kernels.fold_blocks(count, dtype.itemsize)
            arguments: list[Any] = [
                (ctypes.c_uint64 * num_inputs)(*[operand.data_ptr() for operand in operands]),
                ctypes.c_uint64(output.data_ptr()),
                ctypes.c_uint64(count),
                ctypes.c_uint64(1),
            ]
            seconds = median_s(lambda k=kernel, b=blocks, a=arguments: kernels.launch(k, b, stream, *a))
            rate = (num_inputs + 1) * num_bytes / seconds
            lines.append(f"fold {num_inputs} x {dtype.value}: {rate / 1e12:.2f} TB/s, {rate / copy:.2f} of the copy")
    return lines


class Row(NamedTuple):
    """One collective of one size: medians of stock NCCL and of detcomm.

    Attributes:
        stock_ms, detcomm_ms: of a call by itself.
        stock_row_ms, detcomm_row_ms: of each of some calls in a row, which hide the host's time.
    """

    collective: str
    num_bytes: int
    num_ranks: int
    stock_ms: float
    detcomm_ms: float
    stock_host_us: float
    detcomm_host_us: float
    stock_row_ms: float
    detcomm_row_ms: float

    def __str__(self) -> str:
        return (
            f"{self.collective:14} {self.num_bytes:>10} B  stock {self.stock_ms:8.3f} ms  "
            f"detcomm {self.detcomm_ms:8.3f} ms  ratio {self.detcomm_ms / self.stock_ms:.2f}  "
            f"host {self.stock_host_us:.0f} / {self.detcomm_host_us:.0f} us  "
            f"in a row {self.stock_row_ms:.3f} / {self.detcomm_row_ms:.3f} ms = "
            f"{self.detcomm_row_ms / self.stock_row_ms:.2f}"
        )


def table(rank: int, world_size: int, sizes: tuple[int, ...] = SIZES) -> list[Row]:
    """Stock and detcomm in turn, bfloat16; on rank 0."""
    device = start(rank, world_size)
    groups = {"stock": dist.new_group(backend="nccl"), "detcomm": None}
    rows = []
    for num_bytes in sizes:
        count = num_bytes // 2
        tensor = torch.ones(count, dtype=torch.bfloat16, device=device)
        shard = torch.empty(count // world_size, dtype=torch.bfloat16, device=device)
        actions = {
            "all_reduce": lambda group, t=tensor: dist.all_reduce(t, group=group),
            "reduce_scatter": lambda group, t=tensor, s=shard: dist.reduce_scatter_tensor(s, t, group=group),
            "all_gather": lambda group, t=tensor, s=shard: dist.all_gather_into_tensor(t, s, group=group),
        }
        for name, action in actions.items():
            is_short = num_bytes <= 1 << 20
            device_ms, host_us = in_turn(action, groups, 60 if is_short else 16)
            row_ms, _ = in_turn(action, groups, 20 if is_short else 6, num_calls=10 if is_short else 3)
            times = [each[which] for each in (device_ms, host_us, row_ms) for which in ("stock", "detcomm")]
            rows.append(Row(name, num_bytes, world_size, *times))
    dist.destroy_process_group()
    return rows


def in_turn(
    action: Any, groups: dict[str, Any], turns: int, num_calls: int = 1
) -> tuple[dict[str, float], dict[str, float]]:
    """Medians of an action on each of several groups in turn: ms on the device of the slowest rank, us of the host.

    With several calls these are issued one after the other, and a call's share is told.

    All ranks begin each call at the same moment, and no group always comes after the same other: ranks leave a
    collective one after the other, and what follows would count their waiting for each other as its own.
    """
    device_ms: dict[str, list[float]] = {name: [] for name in groups}
    host_us: dict[str, list[float]] = {name: [] for name in groups}
    num_warm = 3 + turns // 3
    names = list(groups)
    for turn in range(turns + num_warm):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            _begin_together()
            begin.record()
            started = time.perf_counter()
            for _ in range(num_calls):
                action(groups[name])
            host = time.perf_counter() - started
            end.record()
            torch.cuda.synchronize()
            if turn >= num_warm:
                device_ms[name].append(begin.elapsed_time(end) / num_calls)
                host_us[name].append(host * 1e6 / num_calls)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (device_ms, host_us))
    slowest = {
        name: [max(times) for times in zip(*(each[name] for each, _ in of_ranks), strict=True)] for name in names
    }
    hosts = {name: [value for _, each in of_ranks for value in each[name]] for name in names}
    return _medians(slowest), _medians(hosts)


def _begin_together() -> None:
    """Rank 0 says when, by the clock that all processes of a machine share; the GPU is idle until then."""
    torch.cuda.synchronize()
    moment = torch.tensor([time.perf_counter() + 0.002], dtype=torch.float64)
    dist.broadcast(moment, 0)
    begin = moment.item()
    while time.perf_counter() < begin:
        pass


def _medians(values: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in values.items()}


def median_s(action: Any, turns: int = 15) -> float:
    """Device time of an action."""
    times = []
    for turn in range(turns + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        action()
        end.record()
        torch.cuda.synchronize()
        if turn >= 3:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)
