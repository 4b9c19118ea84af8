# SPDX-License-Identifier: Apache-2.0
"""The ranks of one training run as processes: started, listened to, and ended whatever happens."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path

from torch.distributed import TCPStore

from demo.training import WORLD_SIZE, Setting, Trained, train

TIMEOUT_S = 900.0


class RunFailure(Exception):
    """A rank raised, died or did not finish."""


def run(
    setting: Setting, num_steps: int, weights_file: Path | None, report: Callable[[int, float], None]
) -> list[Trained]:
    """Train with one setting; what each rank has at the end, by rank. ``report`` is told of rank 0's steps.

    Raises:
        RunFailure: with the traceback of the first rank that failed.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "attrs"])
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(minutes=5), wait_for_workers=False)
    pipes: dict[Connection, int] = {}
    processes = []
    try:
        for rank in setting.ranks:
            ours, theirs = context.Pipe(duplex=False)
            file = weights_file if rank == 0 else None
            arguments = (theirs, setting, rank, int(store.port), num_steps, file)
            process = context.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        return _listen(pipes, report)
    finally:
        deadline = time.monotonic() + 5.0
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()


def _listen(pipes: dict[Connection, int], report: Callable[[int, float], None]) -> list[Trained]:
    deadline = time.monotonic() + TIMEOUT_S
    trained: dict[int, Trained] = {}
    waiting = dict(pipes)
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RunFailure(f"ranks {sorted(waiting.values())} did not finish within {TIMEOUT_S:g} s")
        for pipe, rank in list(waiting.items()):
            if pipe not in ready:
                continue
            try:
                message = pipe.recv()
            except EOFError:
                raise RunFailure(f"rank {rank} died") from None
            if isinstance(message, Trained):
                trained[rank] = message
                del waiting[pipe]
            elif isinstance(message, str):
                raise RunFailure(f"rank {rank} raised\n{message}")
            else:
                report(*message)
    return [trained[rank] for rank in range(WORLD_SIZE)]


def _rank_main(
    pipe: Connection, setting: Setting, rank: int, port: int, num_steps: int, weights_file: Path | None
) -> None:
    def report(step: int, loss: float) -> None:
        if rank == 0:
            pipe.send((step, loss))

    try:
        pipe.send(train(setting, rank, port, num_steps, weights_file, report))
    except BaseException:
        pipe.send(traceback.format_exc())
