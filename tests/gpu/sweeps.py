# SPDX-License-Identifier: Apache-2.0
"""Numbers that only decide speed, swept: pieces of a pipelined plan, blocks of a fold. For whoever tunes them."""

import ctypes
from typing import Any

import torch
import torch.distributed as dist

from detcomm.collectives import DType, ReduceOp
from detcomm.cuda import bounded_plan
from detcomm.cuda.device import kernels_of
from detcomm.fold_spec import FoldSpec
from detcomm.options import Options
from tests.gpu.collectives import start
from tests.gpu.speed import in_turn, median_s

PIECES_MIB = (8, 16, 32, 64)
BLOCKS_PER_PROCESSOR = (4, 8, 16, 32, 1 << 20)


def chunks(rank: int, world_size: int) -> list[str]:
    """All-reduce and reduce-scatter of long messages by the length of a piece, beside stock NCCL."""
    device = start(rank, world_size)
    groups: dict[str, Any] = {"stock": dist.new_group(backend="nccl")}
    for mib in PIECES_MIB:
        options = Options(chunk_bytes=mib << 20, scratch_bytes=512 << 20)
        groups[f"{mib} MiB"] = dist.new_group(backend="detcomm", pg_options=options)
    options = Options(chunk_bytes=64 << 20, scratch_bytes=512 << 20, schedule="direct")
    groups["64 MiB, messages alone"] = dist.new_group(backend="detcomm", pg_options=options)
    lines = []
    for num_bytes in (16 << 20, 64 << 20):
        tensor = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=device)
        shard = torch.empty(num_bytes // 2 // world_size, dtype=torch.bfloat16, device=device)
        for name, action in (
            ("all_reduce", lambda group, t=tensor: dist.all_reduce(t, group=group)),
            ("reduce_scatter", lambda group, t=tensor, s=shard: dist.reduce_scatter_tensor(s, t, group=group)),
        ):
            device_ms, _ = in_turn(action, groups, 5)
            lines.append(f"{name} {num_bytes >> 20} MiB, ms: {_told(device_ms)}")
    dist.destroy_process_group()
    return lines


def short(rank: int, world_size: int) -> list[str]:
    """All-reduce of short messages by schedule, by messages and by NCCL's gather; single calls, and ten in a row."""
    device = start(rank, world_size)
    groups: dict[str, Any] = {"stock": dist.new_group(backend="nccl")}
    for schedule in ("oneshot", "direct"):
        groups[schedule] = dist.new_group(backend="detcomm", pg_options=Options(schedule=schedule))
    groups["gather"] = dist.new_group(backend="detcomm")
    usual = bounded_plan.GATHER_INPUT_BYTES
    lines = []
    for kib in (1, 4, 8, 16, 32):
        tensor = torch.ones(kib << 9, dtype=torch.bfloat16, device=device)
        bounded_plan.GATHER_INPUT_BYTES = 1 << 20
        dist.all_reduce(tensor, group=groups["gather"])  # its plan is kept
        bounded_plan.GATHER_INPUT_BYTES = usual
        for num_calls in (1, 10):
            device_ms, host_us = in_turn(lambda group, t=tensor: dist.all_reduce(t, group=group), groups, 20, num_calls)
            lines.append(f"all_reduce {kib} KiB, {num_calls} in a row, ms: {_told(device_ms)}")
        lines.append(f"    host us: {', '.join(f'{name} {value:.0f}' for name, value in host_us.items())}")
    dist.destroy_process_group()
    return lines


def exchanges(rank: int, world_size: int) -> list[str]:
    """A long reduce-scatter beside stock NCCL's; and stock NCCL's own exchange of the same bytes, in several ways."""
    device = start(rank, world_size)
    stock = dist.new_group(backend="nccl")
    reference = dist.new_group(backend="detcomm", pg_options=Options(cuda_path="reference", node_size=1))
    lines = []
    for num_bytes in (16 << 20, 64 << 20):
        tensor = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=device)
        shard = torch.empty(num_bytes // 2 // world_size, dtype=torch.bfloat16, device=device)
        whole = torch.empty_like(tensor)
        actions: dict[str, Any] = {
            "stock": lambda t=tensor, s=shard: dist.reduce_scatter_tensor(s, t, group=stock),
            "detcomm": lambda t=tensor, s=shard: dist.reduce_scatter_tensor(s, t),
            "reference": lambda t=tensor, s=shard: dist.reduce_scatter_tensor(s, t, group=reference),
            "stock all_to_all": lambda t=tensor, w=whole: dist.all_to_all_single(w, t, group=stock),
            "stock messages, 1 peer at a time": lambda t=tensor, w=whole: _rounds(t, w, 1, stock),
            "2 peers at a time": lambda t=tensor, w=whole: _rounds(t, w, 2, stock),
            "all at once": lambda t=tensor, w=whole: _rounds(t, w, world_size, stock),
        }
        device_ms, _ = in_turn(lambda action: action(), actions, 16)
        ratios = ", ".join(f"{name} {value / device_ms['stock']:.2f}" for name, value in device_ms.items())
        lines.append(f"reduce_scatter {num_bytes >> 20} MiB: stock {device_ms['stock']:.1f} ms; {ratios}")
    dist.destroy_process_group()
    return lines


def _rounds(source: torch.Tensor, target: torch.Tensor, num_peers: int, group: Any) -> None:
    """Parts go to the ranks behind this one and come from those before it, so many of each in a group of NCCL's."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    sent, got = source.chunk(world_size), target.chunk(world_size)
    for first in range(1, world_size, num_peers):
        messages = []
        for apart in range(first, min(first + num_peers, world_size)):
            behind, before = (rank + apart) % world_size, (rank - apart) % world_size
            messages += [
                dist.P2POp(dist.isend, sent[behind], group=group, group_peer=behind),
                dist.P2POp(dist.irecv, got[before], group=group, group_peer=before),
            ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()


def _told(device_ms: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in device_ms.items())


def blocks(rank: int, world_size: int) -> list[str]:
    """The fold kernel by blocks a multiprocessor, as shares of a device copy; 128 MiB operands."""
    torch.cuda.set_device(0)
    kernels = kernels_of(0)
    stream = torch.cuda.current_stream().cuda_stream
    num_bytes = 128 << 20
    src, dst = (torch.empty(4 * num_bytes, dtype=torch.uint8, device="cuda").fill_(k) for k in (1, 2))
    copy = 8 * num_bytes / median_s(lambda: dst.copy_(src))
    lines = [f"device copy {copy / 1e12:.2f} TB/s"]
    for dtype in (DType.BFLOAT16, DType.FLOAT32):
        for num_inputs in (2, 3, 4, 8):
            operands = [torch.randn(num_bytes // 4, device="cuda").view(torch.uint8) for _ in range(num_inputs)]
            output = torch.empty_like(operands[0])
            spec = FoldSpec(ReduceOp.SUM, dtype, "float32", "tree", (True,) * num_inputs, True)
            arguments: list[Any] = [
                (ctypes.c_uint64 * num_inputs)(*[operand.data_ptr() for operand in operands]),
                ctypes.c_uint64(output.data_ptr()),
                ctypes.c_uint64(num_bytes // dtype.itemsize),
                ctypes.c_uint64(1),
            ]
            kernel = kernels.fold(spec)
            shares = []
            for each in BLOCKS_PER_PROCESSOR:
                num_blocks = min(each * kernels.num_processors, num_bytes // 16 // 256)
                seconds = median_s(lambda k=kernel, b=num_blocks, a=arguments: kernels.launch(k, b, stream, *a), 9)
                shares.append(f"{min(each, 9999)}: {(num_inputs + 1) * num_bytes / seconds / copy:.3f}")
            lines.append(f"fold {num_inputs} x {dtype.value}, by blocks: {', '.join(shares)}")
    return lines
