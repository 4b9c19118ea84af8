# SPDX-License-Identifier: Apache-2.0
"""Golden runs on a GPU: digests by the device's arithmetic are those of a copy on the CPU; a sharded model's too."""

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from detcomm.golden import Grid, Recorder, digest
from detcomm.golden.file import read

DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
)


def digests(rank: int, world_size: int) -> list[str]:
    """Every type, more than one chunk of it; a strided part; then the time and the memory of a large tensor."""
    random = np.random.default_rng(0)
    for name in DTYPES:
        kind = getattr(torch, name)
        memory = torch.from_numpy(random.integers(0, 256, 4_200_011 * kind.itemsize, dtype=np.uint8))
        tensor = memory > 127 if kind is torch.bool else memory.view(kind)
        assert digest(tensor.cuda(), offset=7) == digest(tensor, offset=7), name
    values, columns = torch.randn(6, 10), Grid((range(6), np.arange(1, 10, 2)), (6, 10))
    assert digest(values.cuda()[:, 1::2], indices=columns) == digest(values[:, 1::2], indices=columns)
    large = torch.randn(1 << 28, device="cuda")
    digest(large)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    started = time.monotonic()
    digest(large)
    took_s = time.monotonic() - started
    scratch_mib = (torch.cuda.max_memory_allocated() - before) >> 20
    return [f"{len(DTYPES)} types; 1 GiB of float32 in {took_s * 1e3:.0f} ms with {scratch_mib} MiB of scratch"]


def recorded(rank: int, world_size: int, backend: str) -> str:
    """FSDP2 on CUDA: the file holds the digests of the whole weights."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3, bias=False)).cuda()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    folder = tempfile.mkdtemp() if rank == 0 else ""
    path = Path(folder, "run.golden")
    with Recorder(path) as run:
        for step in range(2):
            loss = model(torch.full((4, 8), 0.1 * (rank + step), device="cuda")).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(step, loss=loss, model=model, optimizer=optimizer)
    wholes = {name: digest(value.full_tensor().cpu()) for name, value in model.named_parameters()}  # type: ignore[attr-defined]
    dist.destroy_process_group()
    if rank:
        return ""
    file = read(path)
    for name, whole in wholes.items():
        assert file.steps[1].tensors["weights", name].digest == str(whole), name
    return f"{backend}: {file.environment['numerics']} on {file.environment['device']}: {len(wholes)} weights"
