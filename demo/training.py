# SPDX-License-Identifier: Apache-2.0
"""One training run as each of its ranks sees it: plain DDP, and nothing that knows which backend reduces.

All that differs from run to run is a ``Setting``; data and seeds follow the rank, so every setting trains the same
model on the same batches.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from demo.model import CONTEXT, VOCABULARY, ByteTransformer, corpus

WORLD_SIZE = 4
BATCH = 8
"""Sequences of one rank in one step."""

Report = Callable[[int, float], None]
"""Told the step and its mean loss over all ranks."""


@dataclass(frozen=True)
class Setting:
    """How a run is done. None of it is part of the mathematics of the training.

    Attributes:
        bucket_mb: DDP's ``bucket_cap_mb``: how gradients are grouped into messages.
        ranks: the rank that each process plays, by process.
        environment: variables that choose how detcomm moves the bytes.
    """

    backend: str
    bucket_mb: float
    ranks: tuple[int, ...] = tuple(range(WORLD_SIZE))
    environment: dict[str, str] = field(default_factory=dict)
    remark: str = ""

    @property
    def name(self) -> str:
        """As the table shows it."""
        return f"{self.backend}, buckets of {self.bucket_mb:g} MB" + (f", {self.remark}" if self.remark else "")


@dataclass(frozen=True)
class Trained:
    """What a rank has at the end."""

    weights: str
    """SHA-256 over the bits of all parameters, in hexadecimal."""
    losses: tuple[float, ...]


def train(setting: Setting, rank: int, port: int, num_steps: int, weights_file: Path | None, report: Report) -> Trained:
    """Train as ``rank`` of ``WORLD_SIZE``.

    Args:
        port: of the store that serves the rendezvous.
        weights_file: where to append all parameters' bits after each step, in float32.
    """
    os.environ |= setting.environment
    import detcomm  # noqa: F401  registers the backend

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    store = dist.TCPStore("127.0.0.1", port, WORLD_SIZE, is_master=False, timeout=timedelta(minutes=5))
    dist.init_process_group(setting.backend, store=store, rank=rank, world_size=WORLD_SIZE)
    try:
        return _train_in_group(setting, rank, num_steps, weights_file, report)
    finally:
        dist.destroy_process_group()


def _train_in_group(setting: Setting, rank: int, num_steps: int, weights_file: Path | None, report: Report) -> Trained:
    torch.manual_seed(0)
    model = ByteTransformer()
    replicated = DistributedDataParallel(model, bucket_cap_mb=setting.bucket_mb)
    optimizer = torch.optim.AdamW(replicated.parameters(), lr=1e-3)
    text = corpus()
    draw = torch.Generator().manual_seed(1000 + rank)
    losses = []
    for step in range(num_steps):
        inputs, targets = _batch(text, draw)
        optimizer.zero_grad()
        loss = functional.cross_entropy(replicated(inputs).view(-1, VOCABULARY), targets.reshape(-1))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / WORLD_SIZE)
        report(step + 1, losses[-1])
        if weights_file is not None:
            with weights_file.open("ab") as file:
                file.write(_weights(model))
    return Trained(hashlib.sha256(_weights(model)).hexdigest(), tuple(losses))


def _batch(text: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=draw)
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def _weights(model: torch.nn.Module) -> bytes:
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
