# SPDX-License-Identifier: Apache-2.0
"""``detcomm.megatron`` on GPUs: its group of all ranks, the exact norm against the CPU's, the switch between steps."""

import time
from typing import Any

import torch
import torch.distributed as dist

from detcomm import megatron
from detcomm.megatron.exact_squares import SquareSum

STEPS = range(2, 4)
NUM_ELEMS = 1 << 16
NORM_ELEMS = 1 << 26


def switching(rank: int, world_size: int) -> list[str]:
    """In the range detcomm's bits, outside it stock NCCL's, in flight across an edge or not."""
    job = megatron.initialize(steps=STEPS)
    device = torch.device("cuda", torch.cuda.current_device())
    fixed = _collectives(dist.new_group(backend="cpu:gloo,cuda:detcomm"), rank, world_size, device)
    stock = _collectives(dist.new_group(backend="nccl"), rank, world_size, device)
    num_like_stock = 0
    for step in range(6):
        in_fixed_order = job.at_step(step)
        late = _given(rank, device)
        work = dist.all_reduce(late, async_op=True)
        found = _collectives(dist.group.WORLD, rank, world_size, device)
        job.at_step(step + 1)  # an edge, or nothing
        work.wait()
        assert in_fixed_order == (step in STEPS)
        if in_fixed_order:
            assert _same(found, fixed), f"step {step}: other bits than detcomm's"
            assert torch.equal(late.view(torch.int32), fixed["sum"].view(torch.int32)), "in flight across an edge"
        else:
            num_like_stock += _same(found, stock)
            assert not _same(found, fixed), f"step {step}: stock steps have detcomm's bits"
    report = megatron.report()
    backend = report.groups[0].backend
    job.close()
    dist.destroy_process_group()
    assert backend == "cpu:gloo,cuda:detcomm_switched"
    return [
        f"{backend}: steps {STEPS.start} to {STEPS.stop - 1} in fixed order, {num_like_stock} of 4 others as plain NCCL"
    ]


def exact_norm(rank: int, world_size: int) -> list[str]:
    """The same integer on GPU and CPU, under deterministic algorithms, for every partition; and what it takes."""
    job = megatron.initialize(exact_grad_norm=True)
    device = torch.device("cuda", torch.cuda.current_device())
    values = torch.randn(1 << 21, generator=torch.Generator().manual_seed(3)) * torch.logspace(-30, 8, 1 << 21)
    values[:100] = torch.arange(100, dtype=torch.int32).view(torch.float32)
    on_gpu = SquareSum.of([values.to(device)])
    assert on_gpu == SquareSum.of([values]), "GPU and CPU differ"
    halves = [values.to(device, torch.bfloat16)]
    assert SquareSum.of(halves) == SquareSum.of([half.cpu() for half in halves])
    norms = set()
    for num_parts in (world_size, 3 * world_size + 1):
        own = values.tensor_split(num_parts)[rank::world_size]
        norms.add(megatron.exact_grad_norm([part.to(device) for part in own], [None]).hex())
    assert norms == {on_gpu.root().hex()}, "the partition shows"
    gradients = torch.randn(NORM_ELEMS, device=device) * 1e-3
    times = {"exact": _seconds(lambda: SquareSum.of([gradients])), "float32": _seconds(lambda: gradients.norm().item())}
    job.close()
    dist.destroy_process_group()
    told = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in times.items())
    return [f"norm {on_gpu.root():.9g} on GPU and CPU; {NORM_ELEMS:,} gradients a rank, all ranks at once: {told}"]


def _seconds(run: Any) -> float:
    run()
    took = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - started)
    return sorted(took)[2]


def _given(rank: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-4, 4, (NUM_ELEMS,), generator=generator)
    return (torch.randn(NUM_ELEMS, generator=generator) * 10.0**exponents).to(device)


def _collectives(group: Any, rank: int, world_size: int, device: torch.device) -> dict[str, torch.Tensor]:
    shard = NUM_ELEMS // world_size
    given = _given(rank, device)[: shard * world_size]
    summed, scattered, coalesced = _given(rank, device), *(torch.empty(shard, device=device) for _ in range(2))
    gathered = torch.empty(shard * world_size, device=device)
    dist.all_reduce(summed, group=group, async_op=True).wait()
    dist.reduce_scatter_tensor(scattered, given.clone(), group=group)
    with dist._coalescing_manager(group, async_ops=True) as works:
        dist.reduce_scatter_tensor(coalesced, given.clone(), group=group)
    works.wait()
    dist.all_gather_into_tensor(gathered, scattered, group=group)
    torch.cuda.synchronize()
    return {"sum": summed, "scattered": scattered, "coalesced": coalesced, "gathered": gathered}


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name].view(torch.int32), expected[name].view(torch.int32)) for name in expected)
