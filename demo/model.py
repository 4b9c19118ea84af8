# SPDX-License-Identifier: Apache-2.0
"""A small byte-level transformer, and the text it learns: the sources of Python's standard library."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

CONTEXT = 128
WIDTH = 128
NUM_LAYERS = 4
NUM_HEADS = 4
VOCABULARY = 256
CORPUS_BYTES = 1 << 20


def corpus() -> Tensor:
    """The first MiB of the standard library's modules in the order of their names, as bytes."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8)


class ByteTransformer(nn.Module):
    """A causal language model over bytes: 875,264 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the next byte, ``[batch, CONTEXT, VOCABULARY]``, from ``[batch, CONTEXT]``."""
        hidden = self.embedding(text) + self.position
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


class Block(nn.Module):
    """Attention, then a feed-forward layer, each on the normalised input and added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Shape ``[batch, CONTEXT, WIDTH]`` in and out."""
        batch = hidden.shape[0]
        heads = self.query_key_value(self.attention_norm(hidden)).view(batch, CONTEXT, 3, NUM_HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).reshape(batch, CONTEXT, WIDTH))
        output: Tensor = hidden + self.feed_forward(hidden)
        return output
