# SPDX-License-Identifier: Apache-2.0
"""What the model learns: bytes of a text. A sample is a pure function of its number in the training run.

So neither the number of ranks nor where a run was resumed changes which samples a step sees.
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def read(path: str | None) -> Tensor:
    """The bytes of a file, or of the modules of Python's standard library; uint8, one dimension."""
    if path is not None:
        data = Path(path).read_bytes()
    else:
        modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        data = b"".join(module.read_bytes() for module in modules)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def sample(text: Tensor, number: int, length: int, seed: int) -> Tensor:
    """``length + 1`` bytes from a place that ``number`` decides; int64."""
    draw = torch.Generator().manual_seed(seed * 1_000_003 + number)
    start = int(torch.randint(len(text) - length, (), generator=draw))
    return text[start : start + length + 1].long()


def micro_batch(text: Tensor, first: int, size: int, length: int, seed: int) -> dict[str, Tensor]:
    """Samples ``first`` to ``first + size - 1``: ``tokens``, ``labels`` and ``position_ids``, of ``[size, length]``."""
    rows = torch.stack([sample(text, first + index, length, seed) for index in range(size)])
    positions = torch.arange(length).expand(size, length)
    return {"tokens": rows[:, :-1], "labels": rows[:, 1:], "position_ids": positions}


def context_shard(batch: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """What a context-parallel rank has of a micro-batch.

    Of ``2 * size`` pieces one from the front and its mirror image from the back: so causal attention costs all ranks
    the same. Megatron's attention expects this order.
    """
    pieces = {name: value.chunk(2 * size, dim=1) for name, value in batch.items()}
    return {name: torch.cat([parts[rank], parts[2 * size - 1 - rank]], dim=1) for name, parts in pieces.items()}
