# SPDX-License-Identifier: Apache-2.0
"""What communication costs computation: a matrix product beside an all-reduce, and a DDP step beside one without it."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.gpu.collectives import start

MESSAGE_BYTES = 64 << 20
TURNS = 7


def beside_a_product(rank: int, world_size: int) -> list[str]:
    """Rank 0 multiplies while all ranks all-reduce: how much longer both take together than alone."""
    device = start(rank, world_size)
    groups = {"stock": dist.new_group(backend="nccl"), "detcomm": None}
    tensor = torch.ones(MESSAGE_BYTES // 2, dtype=torch.bfloat16, device=device)
    size = 8192
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(left)
    num_products = 20

    def multiply() -> None:
        for _ in range(num_products if rank == 0 else 0):
            torch.mm(left, right, out=product)

    lines = []
    alone_ms: dict[str, list[float]] = {"multiply": [], **{name: [] for name in groups}}
    together_ms: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in groups}
    for turn in range(TURNS + 2):
        took: dict[str, Any] = {"multiply": _ms(multiply)}
        for name, group in groups.items():
            took[name] = _ms(lambda group=group: dist.all_reduce(tensor, group=group))
            work: list[Any] = []
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

            def both(group: Any = group, work: list[Any] = work, begin: Any = begin, end: Any = end) -> None:
                work.append(dist.all_reduce(tensor, group=group, async_op=True))
                begin.record()
                multiply()
                end.record()
                work.pop().wait()

            whole = _ms(both)
            if turn >= 2:
                together_ms[name][0].append(begin.elapsed_time(end))
                together_ms[name][1].append(whole)
        if turn >= 2:
            for name, value in took.items():
                alone_ms[name].append(value)
    product_ms = statistics.median(alone_ms["multiply"])
    for name in groups:
        beside, whole = (statistics.median(values) for values in together_ms[name])
        lines.append(
            f"{name}: {num_products} products {product_ms:.1f} ms alone, {beside:.1f} beside an all_reduce "
            f"({beside / product_ms:.2f}); all_reduce {statistics.median(alone_ms[name]):.1f} ms alone, "
            f"both together {whole:.1f}"
        )
    dist.destroy_process_group()
    return lines


def in_a_step(rank: int, world_size: int) -> list[str]:
    """A DDP step by backend, and the same step without communication: the difference is what is exposed."""
    device = start(rank, world_size)
    groups = {"stock": dist.new_group(backend="nccl"), "detcomm": dist.group.WORLD}
    torch.manual_seed(1)
    replicas = {}
    for name, group in groups.items():
        model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(6)]).to(device)
        replicas[name] = DistributedDataParallel(model, process_group=group, device_ids=[torch.device(device).index])
    batch = torch.randn(8192, 2048, device=device)
    steps_ms: dict[str, list[float]] = {"alone": [], **{name: [] for name in groups}}

    def step(replica: Any, exchanges: bool) -> None:
        replica.zero_grad()
        if exchanges:
            replica(batch).square().mean().backward()
        else:
            with replica.no_sync():
                replica(batch).square().mean().backward()

    for turn in range(TURNS + 3):
        took = {"alone": _ms(lambda: step(replicas["stock"], False))}
        for name, replica in replicas.items():
            took[name] = _ms(lambda replica=replica: step(replica, True))
        if turn >= 3:
            for name, value in took.items():
                steps_ms[name].append(value)
    alone = statistics.median(steps_ms["alone"])
    lines = [f"a step without communication {alone:.1f} ms"]
    for name in groups:
        step_ms = statistics.median(steps_ms[name])
        lines.append(f"{name}: {step_ms:.1f} ms, exposed {step_ms - alone:.1f} ms")
    dist.destroy_process_group()
    return lines


def _ms(action: Callable[[], None]) -> float:
    """Wall time of an action that all ranks begin together."""
    torch.cuda.synchronize()
    dist.barrier()
    started = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3
