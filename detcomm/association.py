# SPDX-License-Identifier: Apache-2.0
"""The association: which additions are done, in which order. The contract that all bits depend on.

    tree, N = 7                 ((((0+1)+(2+3))+((4+5)+6))
                      +
              ________|________
             +                 +          T(n) = T(k) + T(n-k), k the largest power of two below n:
          ___|___           ___|___       RFC 6962's split. Every aligned block of 2^j ranks is a subtree,
         +       +         +       6      so any schedule that folds whole blocks first builds this tree.
        / \\     / \\       / \\
       0   1   2   3     4   5

    linear, N = 4               (((0+1)+2)+3)
    ring, N = 4, owner 1        (((2+3)+0)+1), the owner of element i being (i // ring_chunk_elems) mod N

An association is a value. It knows nothing of messages, schedules, transports or machines.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from detcomm.collectives import Accumulate
from detcomm.errors import UsageError

Shape = Literal["tree", "linear"]
"""The order inside one n-ary fold: RFC 6962's split of the operands, or a left fold."""

Expr = int | tuple["Expr", "Expr"]
"""A tree over ranks: a leaf is a rank, a node is (left, right)."""

NUMERICS_VERSION = 1
DEFAULT_RING_CHUNK_ELEMS = 1 << 16
NAMES = ("tree", "linear", "ring")


def split(num_leaves: int) -> int:
    """Leaves of the left subtree: the largest power of two smaller than ``num_leaves`` (RFC 6962, section 2.1)."""
    if num_leaves < 2:
        raise ValueError(f"a node has at least two leaves, got {num_leaves}")
    return 1 << ((num_leaves - 1).bit_length() - 1)  # bits: the shape of the tree


def combine(shape: Shape, operands: list[Expr]) -> Expr:
    """The tree that a fold of this shape builds over operands given in leaf order."""
    if len(operands) == 1:
        return operands[0]
    if shape == "tree":
        left = split(len(operands))
        return (combine(shape, operands[:left]), combine(shape, operands[left:]))  # bits: left = earlier leaves
    tree = operands[0]
    for operand in operands[1:]:
        tree = (tree, operand)  # bits: the running sum is the left operand
    return tree


def to_text(expr: Expr) -> str:
    """``((0+1)+(2+3))``. Not recursive: a linear chain is as deep as the world is large."""
    parts: list[str] = []
    stack: list[Expr | str] = [expr]
    while stack:
        item = stack.pop()
        if isinstance(item, tuple):
            stack += [")", item[1], "+", item[0], "("]
        else:
            parts.append(str(item))
    return "".join(parts)


def leaf_digest(rank: int) -> bytes:
    """Digest of the contribution of one rank (128 bits)."""
    return hashlib.blake2b(rank.to_bytes(8, "little"), digest_size=16, person=b"detcomm-leaf").digest()


def node_digest(left: bytes, right: bytes) -> bytes:
    """Digest of one addition, the left operand first (128 bits)."""
    return hashlib.blake2b(left + right, digest_size=16, person=b"detcomm-node").digest()


def combine_digests(shape: Shape, digests: list[bytes]) -> bytes:
    """The digest of the tree that a fold of this shape builds over its operands' digests."""
    if shape == "linear":
        digest = digests[0]
        for right in digests[1:]:
            digest = node_digest(digest, right)
        return digest
    # Pairing neighbours and promoting the odd one is the same tree as RFC 6962's split, without recursion.
    level = digests
    while len(level) > 1:
        paired = [node_digest(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = paired + ([level[-1]] if len(level) % 2 else [])
    return level[0]


@dataclass(frozen=True)
class Association:
    """Which additions are done in which order, for every element of a message.

    ``tree`` and ``linear`` treat all elements alike and have one element class. ``ring`` has one class per owner:
    class ``o`` is the left fold that starts at rank ``o + 1`` and ends at its owner ``o``.

    Args:
        name: ``tree``, ``linear`` or ``ring``.
        ring_chunk_elems: elements of one fixed chunk; part of the contract of ``ring`` alone.
    """

    name: str = "tree"
    ring_chunk_elems: int = DEFAULT_RING_CHUNK_ELEMS

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise UsageError(f"unknown association {self.name!r}; expected one of {', '.join(NAMES)}")
        if self.ring_chunk_elems < 1:
            raise UsageError(f"ring_chunk_elems must be at least 1, got {self.ring_chunk_elems}")
        if self.name != "ring":
            object.__setattr__(self, "ring_chunk_elems", DEFAULT_RING_CHUNK_ELEMS)

    @property
    def shape(self) -> Shape:
        """The order inside a fold of consecutive operands."""
        return "tree" if self.name == "tree" else "linear"

    def num_classes(self, world_size: int) -> int:
        """How many different trees the elements of one message have."""
        return world_size if self.name == "ring" else 1

    def element_class(self, index: int, world_size: int) -> int:
        """The class of element ``index``, counted from the start of the tensor given to all-reduce."""
        if self.name != "ring":
            return 0
        return (index // self.ring_chunk_elems) % world_size  # bits: fixed by position, never by message size

    def leaf_order(self, world_size: int, element_class: int = 0) -> range | list[int]:
        """The ranks in the order in which their contributions stand in the tree, left to right."""
        if self.name != "ring":
            return range(world_size)
        first = element_class + 1
        return [(first + step) % world_size for step in range(world_size)]  # bits: starts after the owner

    def tree(self, world_size: int, element_class: int = 0) -> Expr:
        """The whole tree of one element class."""
        return combine(self.shape, list(self.leaf_order(world_size, element_class)))

    def text(self, world_size: int, element_class: int = 0) -> str:
        """The tree in writing, ``((0+1)+(2+3))``."""
        return to_text(self.tree(world_size, element_class))

    def digest(self, world_size: int, element_class: int = 0) -> bytes:
        """128 bits that name the tree: equal digests, equal additions in equal order."""
        return _digest(self, world_size, element_class)

    def digests(self, world_size: int) -> Iterator[bytes]:
        """The digest of each element class in turn."""
        return (self.digest(world_size, cls) for cls in range(self.num_classes(world_size)))

    def numerics_id(self, accumulate: Accumulate = "float32") -> str:
        """The name of the bits: ``tree/1:float32``, ``ring/1[65536]:wire``."""
        chunk = f"[{self.ring_chunk_elems}]" if self.name == "ring" else ""
        return f"{self.name}/{NUMERICS_VERSION}{chunk}:{accumulate}"


@lru_cache(maxsize=4096)
def _digest(association: Association, world_size: int, element_class: int) -> bytes:
    leaves = [leaf_digest(rank) for rank in association.leaf_order(world_size, element_class)]
    return combine_digests(association.shape, leaves)


TREE = Association("tree")
LINEAR = Association("linear")
