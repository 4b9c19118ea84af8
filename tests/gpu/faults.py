# SPDX-License-Identifier: Apache-2.0
"""A rank that dies or does not come while others wait for it on the GPU: nobody hangs."""

import faulthandler
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.gpu.collectives import start

VICTIM = 1


def peer_dies(rank: int, world_size: int, notes: str) -> str:
    """The others' processes end by SIGABRT, and say why. The death's time and their words go to files in ``notes``."""
    faulthandler.disable()  # it would walk the threads' stacks at SIGABRT, and may crash on the way
    os.dup2(os.open(f"{notes}/stderr-{rank}", os.O_CREAT | os.O_WRONLY), 2)
    device = start(rank, world_size)
    tensor = torch.ones(1 << 20, device=device)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank == VICTIM:
        time.sleep(1.0)  # the others are in the next one by then
        Path(notes, "died").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    return "the GPU went on without a peer"


def peer_stays_away(rank: int, world_size: int) -> str:
    """With ``cuda_on_error=raise`` a rank is told at its next call, and can end in good order."""
    import detcomm

    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    options = detcomm.Options(cuda_on_error="raise")
    dist.init_process_group("detcomm", timeout=timedelta(seconds=60), pg_options=options)
    tensor = torch.ones(1000, device=f"cuda:{device}")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    group = dist.new_group(backend="detcomm", timeout=timedelta(seconds=3), pg_options=options)
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    dist.barrier()
    started = time.monotonic()
    text = ""
    if rank != VICTIM:
        dist.all_reduce(tensor, group=group)
    while not text and time.monotonic() - started < 30:
        try:
            group._group.check_usable()
        except RuntimeError as error:
            text = str(error)
        time.sleep(0.05)
    took_s = time.monotonic() - started
    assert "not done on the GPU" in text, text
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    return f"after {took_s:.1f} s: {text}"
