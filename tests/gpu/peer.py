# SPDX-License-Identifier: Apache-2.0
"""Ranks that read each other's memory: the oracle's bits, torch's own symmetric memory's, graphs, groups, bandwidth."""

import time
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist

from detcomm.cuda import prepared
from detcomm.options import Options
from tests.gpu import cases as gpu_cases
from tests.gpu.cases import Case
from tests.gpu.collectives import compare_all, start
from tests.gpu.speed import in_turn, median_s

NODE = 8
"""Ranks of one node: enough that all ranks of a check are on it."""


def _by_peers(case: Case, node_size: int = NODE) -> Case:
    return case._replace(options=attrs.evolve(case.options, cuda_transport="peer", node_size=node_size))


def cases(world_size: int, thorough: bool) -> Iterator[Case]:
    """What NCCL's path is compared on, by peers; then what is new here: blocks of two, and more pieces than slots."""
    for case in gpu_cases.cases(world_size, thorough):
        if case.options.cuda_path == "native" and case.options.node_size is None:
            yield _by_peers(case)
    many = Options(schedule="direct", chunk_bytes=1 << 18)
    yield _by_peers(Case("all_reduce", "bfloat16", "sum", (2 << 20) + 5, many, offset=1))
    yield _by_peers(Case("reduce_scatter", "float32", "sum", 200_003 * world_size, many))
    if world_size > 2:
        for schedule in ("hierarchical", "direct", "halving"):
            options = Options(schedule=schedule, chunk_bytes=1 << 18)
            yield _by_peers(Case("all_reduce", "bfloat16", "sum", 400_009, options), node_size=2)


def bits(rank: int, world_size: int, sizes: tuple[int, ...], fuses: bool = True) -> str:
    """Every case in groups of several sizes; short calls in one launch, or as long ones."""
    if not fuses:
        prepared.FUSED_BYTES = 0  # type: ignore[misc]
    wanted = [(size, case) for size in sizes for case in cases(size, size == max(sizes))]
    return compare_all(start(rank, world_size), rank, world_size, wanted)


def like_torch(rank: int, world_size: int) -> str:
    """``linear`` and ``wire`` are the order of torch's own kernels on symmetric memory; ``float32`` is not."""
    import torch.distributed._symmetric_memory as symmetric

    device = start(rank, world_size)
    group: Any = dist.new_group(
        backend="detcomm",
        pg_options=Options(association="linear", accumulate="wire", cuda_transport="peer", node_size=NODE),
    )
    other: Any = dist.new_group(
        backend="detcomm", pg_options=Options(association="linear", cuda_transport="peer", node_size=NODE)
    )
    # No NaN, which torch's kernels keep as they come, and no zero, where they may start.
    torch.manual_seed(rank)
    source = torch.randn(1 << 20, device=device) * torch.exp2(torch.randint(-20, 20, (1 << 20,), device=device))
    source = source.bfloat16()
    buffer = symmetric.empty(source.numel(), dtype=source.dtype, device=device)
    stock = dist.new_group(backend="nccl")
    symmetric.rendezvous(buffer, stock)
    results = {}
    buffer.copy_(source)
    results["one_shot"] = torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", stock.group_name).clone()
    torch.cuda.synchronize()
    dist.barrier()
    buffer.copy_(source)
    torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", stock.group_name)
    results["two_shot"] = buffer.clone()
    ours, control = source.clone(), source.clone()
    dist.all_reduce(ours, group=group)
    dist.all_reduce(control, group=other)
    for name, theirs in results.items():
        different = int((theirs.view(torch.int16) != ours.view(torch.int16)).sum())
        assert not different, f"{name}: {different} of {ours.numel()} elements have other bits"
    num_other = int((control.view(torch.int16) != ours.view(torch.int16)).sum())
    assert num_other, "these inputs show no rounding"
    dist.barrier()
    del buffer
    dist.destroy_process_group()
    return f"equal to one_shot and two_shot in {ours.numel()} elements; float32 differs in {num_other}"


def graphs_and_groups(rank: int, world_size: int) -> str:
    """Two groups at once on two streams beside a busy GPU, and graphs of both replayed beside eager calls."""
    device = start(rank, world_size)
    options = Options(cuda_transport="peer", node_size=NODE, chunk_bytes=1 << 18)
    groups: list[Any] = [dist.new_group(backend="detcomm", pg_options=options) for _ in range(2)]
    case = Case("all_reduce", "bfloat16", "sum", 700_001, options)
    source = gpu_cases.contribution(case, rank, world_size, device)
    right = torch.from_numpy(gpu_cases.expected(case, world_size).copy()).to(device)
    streams = [torch.cuda.Stream() for _ in groups]
    busy = torch.randn(2048, 2048, device=device)
    num_wrong = torch.zeros((), dtype=torch.int64, device=device)

    def check(tensor: torch.Tensor) -> None:
        num_wrong.add_((tensor.view(torch.uint8) != right).sum())

    for group in groups:
        dist.all_reduce(source.clone(), group=group)
    torch.cuda.synchronize()
    for turn in range(40):
        busy = torch.tanh(busy @ busy)
        for group, stream in zip(groups, streams, strict=True) if turn % 2 else zip(groups, streams[::-1], strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                tensor = source.clone()
                dist.all_reduce(tensor, group=group)
                check(tensor)
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graphs = []
    for group in groups:
        graph, held = torch.cuda.CUDAGraph(), [torch.empty_like(source) for _ in range(3)]
        with torch.cuda.graph(graph):
            for tensor in held:
                tensor.copy_(source)
            works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in held[:2]]
            dist.all_reduce(held[2], group=group)
            for work in works:
                work.wait()
        graphs.append((graph, held))
    for _ in range(20):
        for (graph, _), stream in zip(graphs, streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.replay()
        eager = source.clone()
        dist.all_reduce(eager, group=groups[0])
        check(eager)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        for _, held in graphs:
            for tensor in held:
                check(tensor)
    assert int(num_wrong) == 0, f"rank {rank}: {int(num_wrong)} bytes differ"
    torch.cuda.synchronize()
    del graphs
    dist.destroy_process_group()
    return "80 calls of two groups on two streams, 2 graphs of 3 calls replayed 20 times beside eager calls"


def mapped(rank: int, world_size: int) -> str:
    """Tensors of a pool that peers have mapped, on some ranks or on all: the same bits, and nothing is staged."""
    import detcomm

    device = start(rank, world_size)
    options = Options(cuda_transport="peer", node_size=NODE)
    group: Any = dist.new_group(backend="detcomm", pg_options=options)
    case = Case("all_reduce", "bfloat16", "sum", (3 << 20) + 8, options)
    source = gpu_cases.contribution(case, rank, world_size, device)
    right = gpu_cases.expected(case, world_size)
    dist.all_reduce(source.clone(), group=group)
    torch.cuda.synchronize()
    ordinary = source.clone()
    with detcomm.symmetric_memory(group):
        tensor = torch.empty_like(source)
    for some in (False, True):
        target = ordinary if some and rank % 2 else tensor
        for _ in range(3):
            target.copy_(source)
            dist.all_reduce(target, group=group)
            assert np.array_equal(gpu_cases.host_bytes(target), right), f"rank {rank}: other bits, some={some}"
    times = {}
    for name, target in (("ordinary", ordinary), ("mapped", tensor)):
        ms, _ = in_turn(lambda g, t=target: dist.all_reduce(t, group=g), {name: group}, 16)
        times[name] = ms[name]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.copy_(source)
        dist.all_reduce(tensor, group=group)
    for _ in range(3):
        graph.replay()
        assert np.array_equal(gpu_cases.host_bytes(tensor), right), f"rank {rank}: other bits in a graph"
    del graph
    dist.barrier()
    dist.destroy_process_group()
    return f"mapped on all ranks, on every other, and in a graph: the oracle's bits; {times} ms"


def bandwidth(rank: int, world_size: int) -> list[str]:
    """Bytes that all ranks' kernels read and write, over the time, beside a device copy's: all ranks share one GPU.

    Ordinary tensors, and for long ones tensors that peers have mapped; short ones in one launch and in several.
    """
    device = start(rank, world_size)
    copied = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    target = torch.empty_like(copied)
    dist.barrier()
    copy = 0.0
    if rank == 0:
        copy = 2 * copied.numel() / median_s(lambda: target.copy_(copied))
    dist.barrier()
    chosen: dict[str, Any] = {"stock": dist.new_group(backend="nccl")}
    for name, piece in (("peer", None), ("peer 16M", 16 << 20), ("peer 32M", 32 << 20)):
        options = Options(cuda_transport="peer", node_size=NODE, chunk_bytes=piece, scratch_bytes=128 << 20)
        chosen[name] = dist.new_group(backend="detcomm", pg_options=options)
    lines = [f"device copy {copy / 1e12:.2f} TB/s"]
    for num_bytes in (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20):
        tensor = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=device)
        names = ("stock", "peer") if num_bytes < 16 << 20 else tuple(chosen)
        groups = {name: chosen[name] for name in names}
        ms, host = in_turn(lambda g, t=tensor: dist.all_reduce(t, group=g), groups, 24 if num_bytes < 1 << 22 else 9)
        for name in names[1:]:
            lines.append(_line(num_bytes, name, ms, host, _counts(chosen[name]), world_size, copy))
    dist.destroy_process_group()
    return lines


def _line(num_bytes: int, name: str, ms: Any, host: Any, counts: Any, world_size: int, copy: float) -> str:
    moved = world_size * (counts.folded_bytes + counts.copied_bytes)
    rate = moved / (ms[name] / 1e3)
    return (
        f"all_reduce {num_bytes:>10} B {name:9} stock {ms['stock']:8.3f} ms, {ms[name]:8.3f} ms, "
        f"ratio {ms[name] / ms['stock']:.3f}; {counts.num_launches} launches, {rate / 1e12:.2f} TB/s, "
        f"{rate / max(copy, 1.0):.2f} of the copy; host {host['stock']:.0f} / {host[name]:.0f} us"
    )


def _counts(group: Any) -> Any:
    """Of the program made last."""
    known = group._group.cuda._made._communicator._calls._known
    return list(known.values())[-1].program.counts


def cycles(rank: int, world_size: int) -> str:
    """Groups made and destroyed again and again leave nothing."""
    device = start(rank, world_size)
    options = Options(cuda_transport="peer", node_size=NODE)
    tensor = torch.ones(1000, device=device)
    used = []
    started = time.monotonic()
    for _ in range(12):
        group: Any = dist.new_group(backend="detcomm", pg_options=options)
        dist.all_reduce(tensor, group=group)
        torch.cuda.synchronize()
        dist.destroy_process_group(group)
        dist.barrier()
        free, total = torch.cuda.mem_get_info()
        used.append((total - free) >> 20)
    took_s = time.monotonic() - started
    assert max(used[2:]) - min(used[2:]) < 64, used
    assert np.all(np.isfinite(tensor.cpu().numpy()))
    dist.destroy_process_group()
    return f"12 groups in {took_s:.1f} s, device memory in use {used} MiB"
