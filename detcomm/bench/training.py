# SPDX-License-Identifier: Apache-2.0
"""A data-parallel training step, with each contender and without communication: what an order costs a user in the end.

The model is a stack of equal linear layers, of as many parameters as asked for, under torch's DistributedDataParallel
with buckets of a given size. Steps are timed in turns with a step that does not communicate, and with the buckets'
all-reduces alone; what a step takes longer than one without communication is *exposed* communication.

The optimizer's rate is zero, so that every step is the same one and its gradients can be checked: a part of them is
compared bit by bit with the specified sum of all ranks' own gradients.
"""

import hashlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from detcomm.bench import numbers
from detcomm.bench.contenders import TorchContender
from detcomm.bench.run import Job, gather, meeting
from detcomm.bench.timing import Call, Ranks, Times, percentile, time_in_turns
from detcomm.collectives import DType, ReduceOp
from detcomm.transports.base import Bytes
from detcomm.verification.reference import expected_bits

NO_COMMUNICATION = "none"
"""The name of the row without communication."""

_CHECKED_ELEMS = 1 << 14
"""Gradients of each layer that are checked."""

_UNIT_ROUNDOFF = {DType.FLOAT32: 2.0**-24, DType.BFLOAT16: 2.0**-8, DType.FLOAT16: 2.0**-11, DType.FLOAT64: 2.0**-53}


@dataclass(frozen=True)
class Training:
    """What is trained.

    Args:
        num_parameters: about; layers are square.
        bucket_mb: of gradients, in MiB, as DistributedDataParallel takes it.
        batch: samples of each rank.
    """

    num_parameters: int
    num_layers: int
    bucket_mb: float
    batch: int
    dtype: DType

    @property
    def width(self) -> int:
        """Inputs and outputs of a layer."""
        return max(1, math.isqrt(self.num_parameters // self.num_layers))

    @property
    def exact_parameters(self) -> int:
        """Parameters that the model really has."""
        return self.num_layers * self.width**2

    def model(self, device: torch.device) -> nn.Module:
        """The same weights on every rank and for every contender."""
        torch.manual_seed(1)
        layers: list[nn.Module] = []
        for _ in range(self.num_layers):
            layers += [nn.Linear(self.width, self.width, bias=False), nn.ReLU()]
        return nn.Sequential(*layers).to(device, getattr(torch, self.dtype.value))

    def inputs(self, rank: int, device: torch.device) -> torch.Tensor:
        """This rank's samples."""
        generator = torch.Generator().manual_seed(1000 + rank)
        samples = torch.randn(self.batch, self.width, generator=generator)
        return samples.to(device, getattr(torch, self.dtype.value))


def train(
    training: Training,
    contenders: Sequence[TorchContender],
    job: Job,
    say: Callable[[str], object] = lambda _: None,
) -> list[dict[str, Any]]:
    """Rows of a report, one a contender and one without communication. Every rank calls this.

    Args:
        say: is told what comes next.
    """
    samples = training.inputs(dist.get_rank(), job.device)
    alone = training.model(job.device)
    compute = _step(alone, alone, samples)
    compute()
    own = [_checked_part(parameter) for parameter in alone.parameters()]
    calls: list[Call] = [compute]
    checks = []
    for contender in contenders:
        say(f"checking gradients of {contender.name}")
        model = training.model(job.device)
        devices = [job.device.index] if job.device.type == "cuda" else None
        wrapped = DistributedDataParallel(
            model, device_ids=devices, bucket_cap_mb=training.bucket_mb, process_group=contender.group
        )
        step = _step(wrapped, model, samples)
        for _ in range(2):  # the first step tells DistributedDataParallel the order of gradients
            step()
        checks.append(_check(training, own, [_checked_part(parameter) for parameter in model.parameters()], job))
        calls += [step, _buckets(training, contender, job.device)]
    by_call = time_in_turns(calls, job.effort, Ranks(*meeting(job.device)), say)
    baseline, rows = by_call[0], [_row(NO_COMMUNICATION, by_call[0])]
    for index, (contender, check) in enumerate(zip(contenders, checks, strict=True)):
        step_times, bucket_times = by_call[1 + 2 * index], by_call[2 + 2 * index]
        exposed = statistics.median(
            with_it - without for with_it, without in zip(step_times.turns, baseline.turns, strict=True)
        )
        rows.append(
            _row(contender.name, step_times)
            | {
                "exposed_us": round(exposed * 1e6, 1),
                "buckets_us": round(statistics.median(bucket_times.turns) * 1e6, 1),
            }
            | check
        )
    return rows


def _row(name: str, times: Times) -> dict[str, Any]:
    return {
        "contender": name,
        "step_us": round(statistics.median(times.turns) * 1e6, 1),
        "p50_us": round(percentile(times.calls, 50) * 1e6, 1),
        "p99_us": round(percentile(times.calls, 99) * 1e6, 1),
    }


def _step(forward: nn.Module, model: nn.Module, samples: torch.Tensor) -> Call:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step() -> None:
        optimizer.zero_grad()
        forward(samples).float().square().mean().backward()
        optimizer.step()

    return step


def _buckets(training: Training, contender: TorchContender, device: torch.device) -> Call:
    """The all-reduces of a step, posted together and then waited for."""
    left, most = training.exact_parameters, max(1, int(training.bucket_mb * (1 << 20)) // training.dtype.itemsize)
    sizes = [most] * (left // most) + ([left % most] if left % most else [])
    buckets = [torch.zeros(size, dtype=getattr(torch, training.dtype.value), device=device) for size in sizes]

    def reduce() -> None:
        works = [dist.all_reduce(bucket, group=contender.group, async_op=True) for bucket in buckets]
        for work in works:
            work.wait()

    return reduce


def _checked_part(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach().reshape(-1)[:_CHECKED_ELEMS].cpu().clone()


def _check(training: Training, own: list[torch.Tensor], got: list[torch.Tensor], job: Job) -> dict[str, Any]:
    """Elements that are wrong on any rank, and that have other bits than specified."""
    world_size, dtype = dist.get_world_size(), training.dtype
    divided = torch.cat(own).mul_(1.0 / world_size)  # before the sum, as DistributedDataParallel does
    given: list[Bytes] = gather(_bytes(divided))
    received = _bytes(torch.cat(got))
    expected = expected_bits(job.association, job.accumulate, ReduceOp.SUM, dtype, given, ())
    wanted, found = (numbers.decode(dtype, data) for data in (expected, received))
    magnitude = sum((np.abs(numbers.decode(dtype, data)) for data in given), np.zeros(wanted.size))
    wrong = np.abs(found - wanted) > 2 * world_size * _UNIT_ROUNDOFF[dtype] * magnitude
    told = gather(
        (
            int(np.count_nonzero(wrong)),
            numbers.differing_elements(received, expected, dtype),
            hashlib.blake2b(received.tobytes(), digest_size=16).digest(),
        )
    )
    return {
        "checked": wanted.size,
        "wrong": sum(one[0] for one in told),
        "bitdiff": max(one[1] for one in told),
        "digest": hashlib.blake2b(b"".join(one[2] for one in told), digest_size=8).hexdigest(),
    }


def _bytes(tensor: torch.Tensor) -> Bytes:
    data: Bytes = tensor.contiguous().view(torch.uint8).numpy()
    return data
