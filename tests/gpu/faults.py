# SPDX-License-Identifier: Apache-2.0
"""A rank that dies or does not come while others wait for it on the GPU: nobody hangs."""

import faulthandler
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

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
    group = _group_that_raises(rank)
    tensor = torch.ones(1000, device="cuda")
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    dist.barrier()
    started = time.monotonic()
    if rank != VICTIM:
        dist.all_reduce(tensor, group=group)
    text = _told(group)
    took_s = time.monotonic() - started
    assert "not done on the GPU" in text or f"the GPU has waited 3 s for rank {VICTIM}" in text, text
    assert "in collective #2" in text or "collective #2, " in text, text
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    return f"after {took_s:.1f} s: {text}"


def calls_differ(rank: int, world_size: int) -> str:
    """A rank that comes two seconds late with another length: the records say so, or NCCL refuses what it gets."""
    group = _group_that_raises(rank)
    tensor = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == VICTIM:
        time.sleep(2.0)
    dist.all_reduce(tensor[: 1 << 19] if rank == VICTIM else tensor, group=group)
    text = _told(group)
    assert "calls do not match" in text or "NCCL" in text, text
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    return text


def _group_that_raises(rank: int) -> Any:
    """A group of all ranks with a timeout of three seconds, beside a default group that stays whole."""
    import detcomm

    torch.cuda.set_device(rank % torch.cuda.device_count())
    options = detcomm.Options(cuda_on_error="raise")
    dist.init_process_group("detcomm", timeout=timedelta(seconds=60), pg_options=options)
    dist.all_reduce(torch.ones(1000, device="cuda"))
    torch.cuda.synchronize()
    return dist.new_group(backend="detcomm", timeout=timedelta(seconds=3), pg_options=options)


def _told(group: Any) -> str:
    """The group's first error; empty if there is none for half a minute."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            group._group.check_usable()
        except RuntimeError as error:
            return str(error)
        time.sleep(0.05)
    return ""
