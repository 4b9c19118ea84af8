# SPDX-License-Identifier: Apache-2.0
"""``detcomm bench`` on CUDA tensors: rows and a training step, with NCCL as it chooses, with its ring, and detcomm."""

import torch
import torch.distributed as dist

from detcomm.association import TREE
from detcomm.bench import Case, Effort, Job, Report, measure, open_contender
from detcomm.bench.contenders import TorchContender
from detcomm.bench.report import refusal_texts
from detcomm.bench.table import header, legend, line
from detcomm.bench.training import Training, train
from detcomm.collectives import Collective, DType

SIZES = (4 << 10, 1 << 20, 64 << 20)


def rows(rank: int, world_size: int) -> list[str]:
    """What the command prints; raises if a result is wrong or detcomm's bits are not the specified ones."""
    contenders, job = _open(rank)
    found = []
    for collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
        for dtype in (DType.FLOAT32, DType.BFLOAT16):
            for num_bytes in SIZES:
                found += measure(Case(collective, dtype, num_bytes), contenders, job)
    report = Report(world_size, "detcomm", found, "cuda")
    refused = [text for one in found for text in refusal_texts(one)]
    assert not report.breaches(), report.breaches()
    assert not refused, refused
    dist.destroy_process_group()
    return [*legend(report.numerics_id), *header(), *map(line, report.rows())]


def step(rank: int, world_size: int) -> list[str]:
    """A training step of some 100 million parameters."""
    contenders, job = _open(rank)
    found = train(Training(100_000_000, 8, 25.0, 64, DType.BFLOAT16), contenders, job)
    dist.destroy_process_group()
    for row in found:
        assert not row.get("wrong"), row
        assert row["contender"] != "detcomm" or row["bitdiff"] == 0, row
    return [str(row) for row in found]


def _open(rank: int) -> tuple[list[TorchContender], Job]:
    import detcomm  # noqa: F401  # registers the backend

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    opened = [open_contender(name, device) for name in ("detcomm", "nccl", "nccl-ring")]
    contenders = [contender for contender in opened if isinstance(contender, TorchContender)]
    return contenders, Job(device, Effort(rounds=5, iters=20), TREE, "float32")
