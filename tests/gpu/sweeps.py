# SPDX-License-Identifier: Apache-2.0
"""Numbers that only decide speed, swept: pieces of a pipelined plan, blocks of a fold. For whoever tunes them."""

import ctypes
from typing import Any

import torch
import torch.distributed as dist

from detcomm.collectives import DType, ReduceOp
from detcomm.cuda.device import kernels_of
from detcomm.fold_spec import FoldSpec
from detcomm.options import Options
from tests.gpu.collectives import start
from tests.gpu.speed import in_turn, median_s

CHUNKS = (1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20, 64 << 20)
BLOCKS_PER_PROCESSOR = (2, 4, 5, 8, 16, 64)


def chunks(rank: int, world_size: int) -> list[str]:
    """All-reduce and reduce-scatter of large messages by the length of a piece, beside stock NCCL."""
    device = start(rank, world_size)
    groups: dict[str, Any] = {"stock": dist.new_group(backend="nccl")}
    for chunk in CHUNKS:
        options = Options(chunk_bytes=chunk, scratch_bytes=512 << 20)
        groups[f"{chunk >> 20} MiB"] = dist.new_group(backend="detcomm", pg_options=options)
    lines = []
    for num_bytes in (16 << 20, 64 << 20):
        tensor = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=device)
        shard = torch.empty(num_bytes // 2 // world_size, dtype=torch.bfloat16, device=device)
        for name, action in (
            ("all_reduce", lambda group, t=tensor: dist.all_reduce(t, group=group)),
            ("reduce_scatter", lambda group, t=tensor, s=shard: dist.reduce_scatter_tensor(s, t, group=group)),
        ):
            device_ms, _ = in_turn(action, groups, 5)
            told = ", ".join(f"{key} {value:.2f}" for key, value in device_ms.items())
            lines.append(f"{name} {num_bytes >> 20} MiB, ms: {told}")
    dist.destroy_process_group()
    return lines


def blocks(rank: int, world_size: int) -> list[str]:
    """The fold kernel by the most blocks that a multiprocessor gets; 256 MiB of each operand."""
    torch.cuda.set_device(0)
    kernels = kernels_of(0)
    stream = torch.cuda.current_stream().cuda_stream
    num_bytes = 256 << 20
    lines = []
    for dtype in (DType.BFLOAT16, DType.FLOAT32):
        for num_inputs in (2, 3, 4, 8, 16):
            operands = [torch.randn(num_bytes // 4, device="cuda").view(torch.uint8) for _ in range(num_inputs)]
            output = torch.empty_like(operands[0])
            kernel = kernels.fold(FoldSpec(ReduceOp.SUM, dtype, "float32", "tree", (True,) * num_inputs, True))
            arguments: list[Any] = [
                (ctypes.c_uint64 * num_inputs)(*[operand.data_ptr() for operand in operands]),
                ctypes.c_uint64(output.data_ptr()),
                ctypes.c_uint64(num_bytes // dtype.itemsize),
                ctypes.c_uint64(1),
            ]
            rates = []
            for each in BLOCKS_PER_PROCESSOR:
                num_blocks = min(each * kernels.num_processors, num_bytes // 16 // 256)
                seconds = median_s(lambda k=kernel, b=num_blocks, a=arguments: kernels.launch(k, b, stream, *a), 7)
                rates.append(f"{each}: {(num_inputs + 1) * num_bytes / seconds / 1e12:.2f}")
            lines.append(f"fold {num_inputs} x {dtype.value}, TB/s by blocks: {', '.join(rates)}")
    src, dst = (torch.empty(2 * num_bytes, dtype=torch.uint8, device="cuda").fill_(k) for k in (1, 2))
    lines.append(f"device copy {4 * num_bytes / median_s(lambda: dst.copy_(src)) / 1e12:.2f} TB/s")
    return lines
