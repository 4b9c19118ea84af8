# SPDX-License-Identifier: Apache-2.0
"""Which calls are compared with the oracle on GPUs, and the kernels that they need, compiled by all ranks together."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from detcomm.association import Association
from detcomm.call import Call, even_shards
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.cuda.bounded_plan import bounded_peer_plans, bounded_plan
from detcomm.cuda.compile import compile_kernel
from detcomm.cuda.kernels import PEERS, fold_defines
from detcomm.cuda.peer.fused import FUSED_BYTES
from detcomm.cuda.program import fold_spec
from detcomm.options import Options
from tests import inputs, oracle

REAL = {"complex64": "float32", "complex128": "float64"}


class Case(NamedTuple):
    """One call on every rank of a group."""

    collective: str
    dtype: str
    op: str
    count: int
    options: Options
    offset: int = 0
    """Elements between an aligned address and the tensor."""

    def __str__(self) -> str:
        where = f"{self.options.numerics_id} {self.options.schedule}"
        return f"{self.collective} {self.op} {self.dtype}[{self.count}]+{self.offset} {where}"

    def call(self, world_size: int) -> Call:
        """As the core sees it."""
        scale = 2 if self.dtype in REAL else 1
        dtype = DType(REAL.get(self.dtype, self.dtype))
        collective = Collective(self.collective)
        count = self.count * scale
        shards = even_shards(count, world_size) if collective is Collective.REDUCE_SCATTER else None
        return Call(collective, dtype, count, ReduceOp(self.op), shards)


def cases(world_size: int, thorough: bool) -> Iterator[Case]:
    """All types and operations in small, then schedules and associations at sizes that make several pieces."""
    for dtype in inputs.DTYPES if thorough else ("float32", "bfloat16", "int32"):
        for op in inputs.legal_ops(dtype) if thorough else ("sum", "avg"):
            yield Case("all_reduce", dtype, op, 1009, Options(), offset=1)
    for accumulate in ("float32", "wire") if thorough or world_size == 5 else ():
        for association, schedules in (
            ("tree", ("direct", "halving", "oneshot", "binomial")),
            ("linear", ("direct", "oneshot")),
            ("ring", ("ring", "direct")),
        ):
            for schedule in schedules:
                given = {"association": association, "schedule": schedule, "accumulate": accumulate}
                options = Options(**given, ring_chunk_elems=1 << 10, chunk_bytes=1 << 16)
                yield Case("all_reduce", "bfloat16", "sum", 100_003, options, offset=3)
        yield Case("reduce_scatter", "bfloat16", "avg", 30_011 * world_size, Options(accumulate=accumulate))
        yield Case("reduce", "float16", "sum", 5003, Options(accumulate=accumulate))
    yield Case("all_reduce", "float32", "sum", 3 << 20, Options(chunk_bytes=1 << 20))
    yield Case("all_reduce", "float32", "sum", 1, Options())
    for path in ("native", "reference"):  # node_size 1: as if every rank had a host of its own
        options = Options(cuda_path=path, node_size=1)
        yield Case("all_reduce", "bfloat16", "avg", (9 << 20) + 5, options)
        yield Case("all_reduce", "bfloat16", "avg", 1009, options, offset=1)
        yield Case("reduce_scatter", "float32", "sum", 30_011 * world_size, options)
        yield Case("reduce_scatter", "float32", "sum", 61 * world_size, options)
    for association, schedule in (("tree", "halving"), ("linear", "direct"), ("ring", "ring")) if thorough else ():
        options = Options(
            cuda_path="reference", association=association, schedule=schedule, ring_chunk_elems=1 << 10,
            chunk_bytes=1 << 16,
        )  # fmt: skip
        yield Case("all_reduce", "bfloat16", "sum", 100_003, options, offset=3)


def compile_together(all_cases: list[tuple[int, Case]], rank: int, num_ranks: int) -> int:
    """Each rank compiles its part into the cache on disk; how many kernels there are."""
    wanted: dict[str, tuple[str, dict[str, str]]] = {}
    for world_size, case in all_cases:
        if world_size < 2:
            continue
        by_peers = case.options.cuda_transport == "peer"
        block_size, call = case.options.node_size or 1, case.call(world_size)
        if by_peers:
            plan = bounded_peer_plans(call, [0], world_size, case.options, block_size, 1 << 24)[0]
        else:
            plan = bounded_plan(call, 0, world_size, case.options, block_size)
        for step in plan.steps:
            for fold in step.folds:
                defines = fold_defines(fold_spec(fold, plan)) | (PEERS if by_peers else {})
                wanted[str(defines)] = ("fold.cu", defines)
                if (
                    by_peers
                    and case.count * fold_spec(fold, plan).dtype.itemsize <= FUSED_BYTES
                    and len(fold.inputs) <= 8
                ):
                    wanted[f"fused {defines}"] = ("peer_fused.cu", fold_defines(fold_spec(fold, plan)))
    wanted |= {
        "copy": ("copy.cu", {}),
        "peer_copy": ("copy.cu", PEERS),
        "sync": ("peer_sync.cu", {}),
        "fused": ("peer_fused.cu", {}),
    }
    major, minor = torch.cuda.get_device_capability()
    for index, (file, defines) in enumerate(wanted.values()):
        if index % num_ranks == rank:
            compile_kernel(file, defines, f"sm_{major}{minor}")
    return len(wanted)


def contribution(case: Case, rank: int, world_size: int, device: str) -> torch.Tensor:
    """This rank's input, at the case's offset."""
    array = inputs.rank_input(case.dtype, case.count, rank, world_size)
    tensor = torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).copy()).view(getattr(torch, case.dtype))
    room = torch.empty(case.count + case.offset, dtype=tensor.dtype, device=device)
    room[case.offset :].copy_(tensor)
    return room[case.offset :]


def expected(case: Case, world_size: int) -> Any:
    """The oracle's bytes of the whole result."""
    given = inputs.make(case.dtype, case.count, world_size)
    association: Association = case.options.order
    shared: dict[str, Any] = {
        "association": association.name,
        "ring_chunk_elems": association.ring_chunk_elems,
        "accumulate": case.options.accumulate,
        "factors": inputs.factors(world_size) if case.op == "premul_sum" else None,
    }
    return inputs.bits(oracle.reduce(given, case.dtype, case.op, **shared))


def torch_op(case: Case, rank: int, world_size: int) -> Any:
    """The operation as torch names it, with this rank's factor."""
    if case.op == "premul_sum":
        return dist._make_nccl_premul_sum(inputs.factors(world_size)[rank])
    return getattr(dist.ReduceOp, case.op.upper())


def host_bytes(tensor: torch.Tensor) -> Any:
    """Of a tensor of any device and type."""
    return tensor.detach().contiguous().view(torch.uint8).cpu().numpy()
