# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks are about to make the same call, asked over a stock gloo group: for CUDA tensors, if wanted.

Costs a round trip of the host each time, which is why it is an option there. Knows texts and sizes, not what they
describe.
"""

import hashlib
from typing import Any

import torch

from detcomm.errors import MismatchError
from detcomm.header import ranks_text
from detcomm.splits import Splits, describe

_LONGEST_TEXT = 2048


def agree(inner: Any, text: str, splits: Splits | None = None) -> None:
    """Return if every rank has the same text, and splits that fit; all ranks of ``inner`` call this.

    Args:
        inner: a connected gloo group.
        splits: of an all-to-all; given by all ranks whose texts are equal, or by none.

    Raises:
        MismatchError: on every rank, with one text that names ranks and texts.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    if len({int(other) for other in _gather(inner, own)}) == 1:
        if splits is not None:
            table = torch.stack(_gather(inner, torch.tensor([splits.sent, splits.received], dtype=torch.int64))).numpy()
            if (table[:, 0, :] != table[:, 1, :].T).any():
                raise MismatchError(f"the ranks disagree on a call of CUDA tensors; {describe(table)}")
        return
    room = torch.zeros(_LONGEST_TEXT, dtype=torch.uint8)
    content = text.encode()[:_LONGEST_TEXT]
    room[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    told: dict[str, list[int]] = {}
    for rank, other in enumerate(_gather(inner, room)):
        told.setdefault(bytes(other.tolist()).rstrip(b"\0").decode(errors="replace"), []).append(rank)
    parts = [f"{ranks_text(ranks)}: {what}" for what, ranks in told.items()]
    raise MismatchError(f"the ranks disagree on a call of CUDA tensors; {'; '.join(parts)}")


def _gather(inner: Any, own: torch.Tensor) -> list[torch.Tensor]:
    gathered = [torch.empty_like(own) for _ in range(inner.size())]
    inner.allgather([gathered], [own]).wait()
    return gathered
