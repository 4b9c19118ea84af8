# SPDX-License-Identifier: Apache-2.0
"""What a rank of the fault tests does: it reduces until the group fails, and tells how and when it learned of it.

A victim ends or stops itself in the midst. Times are the kernel's monotonic clock, which all nodes share.
"""

import gc
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import detcomm

ELEMENTS = 1 << 16
AT_MOST_S = 200.0
"""A rank that has not failed by then never will."""


@dataclass(frozen=True)
class Loss:
    """How a rank learned that its group had failed.

    Args:
        kind: the error's type.
        text: what it says.
        at_s: when it was raised.
        again: what the next call says.
        destroy_s: how long the destruction of the group took.
        left_behind: open files that were not there before the group was made.
    """

    kind: str
    text: str
    at_s: float
    again: str
    destroy_s: float
    left_behind: tuple[str, ...]


def reduce_until_lost(
    rank: int,
    world_size: int,
    transport: str,
    timeout_s: float,
    victim: int | None = None,
    number: int = 0,
    files: bool = True,
) -> Loss:
    """Make a group, reduce, and go on until an error comes.

    Args:
        victim: the rank that gets a signal after some calls; writes the time of it into the file ``event``.
        number: of the signal.
        files: whether to look at open files; on the side that has lost the store they take 20 seconds to close.
    """
    folder = Path(os.environ["NODE_JOB_FOLDER"])
    options = detcomm.Options(transport=transport)
    open_what_stays(options)
    before = open_files()
    dist.init_process_group("detcomm", pg_options=options)
    tensor = torch.full((ELEMENTS,), float(rank))
    dist.all_reduce(tensor)
    assert tensor[0].item() == sum(range(world_size))
    dist.barrier()
    dist.group.WORLD._group.set_timeout(timedelta(seconds=timeout_s))  # not for the creation, on a loaded machine
    (folder / f"started{rank}").touch()
    deadline = time.monotonic() + AT_MOST_S
    num_calls = 0
    try:
        while time.monotonic() < deadline:
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
            num_calls += 1
            if rank == victim and num_calls == 20:
                (folder / "event.part").write_text(f"{time.monotonic()} {os.getpid()}")
                (folder / "event.part").rename(folder / "event")
                os.kill(os.getpid(), number)
        raise AssertionError(f"no error in {AT_MOST_S:g} s")
    except RuntimeError as error:
        at_s, kind, text = time.monotonic(), type(error).__name__, str(error)
    again = ""
    try:
        dist.all_reduce(torch.ones(4))
    except RuntimeError as error:
        again = str(error)
    started = time.monotonic()
    dist.destroy_process_group()
    destroy_s = time.monotonic() - started
    return Loss(kind, text, at_s, again, destroy_s, left_behind(before) if files else ())


def open_what_stays(options: detcomm.Options) -> None:
    """A group that ends well: what torch and the libraries open once and for all is open afterwards."""
    port = os.environ["MASTER_PORT"]
    os.environ["MASTER_PORT"] = str(int(port) + 1000)
    dist.init_process_group("detcomm", pg_options=options)
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = port


def open_files() -> list[str]:
    """What this process has open, sockets and the like by kind."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}").split(":")[0])
        except OSError:
            continue
    return sorted(found)


def left_behind(before: list[str], patience_s: float = 100.0) -> tuple[str, ...]:
    """What is open now and was not before; gloo's own threads close what they held a little later.

    Where half of a message had come, that is at the timeout of its call.
    """
    deadline = time.monotonic() + patience_s
    while True:
        gc.collect()  # errors hold the frames that they went through
        after = open_files()
        for name in before:
            if name in after:
                after.remove(name)
        if not after or time.monotonic() > deadline:
            return tuple(after)
        time.sleep(0.05)
