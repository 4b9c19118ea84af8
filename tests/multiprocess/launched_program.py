# SPDX-License-Identifier: Apache-2.0
"""What ``test_launchers.py`` starts: a program as users write it, which knows nothing of its launcher.

Usage: ``launched_program.py [victim]``; the victim kills itself in the midst of the collectives.
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import detcomm  # noqa: F401 (registers the backend and reads the launcher's variables)

_LONGEST_S = 60.0


def main(victim: int | None) -> None:
    """Reduce once and say so; with a victim, reduce until it is missed."""
    dist.init_process_group("detcomm", timeout=timedelta(seconds=_LONGEST_S))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((3,), float(2**rank))
    dist.all_reduce(tensor)
    place = f"local {os.environ['LOCAL_RANK']} of {os.environ['LOCAL_WORLD_SIZE']}"
    print(f"rank {rank} of {world_size}, {place}: {tensor[0].item():g}", flush=True)
    if victim is not None:
        dist.barrier()
        started = time.monotonic()
        if rank == victim:
            print(f"dies at {time.time():.3f}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        while time.monotonic() - started < _LONGEST_S:
            dist.all_reduce(torch.ones(1000))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else None)
