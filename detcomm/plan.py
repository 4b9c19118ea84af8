# SPDX-License-Identifier: Apache-2.0
"""What one rank does: a schedule lowered to buffers and byte offsets. Frozen, hashable, printable.

A step is done in this order, each part finished before the next begins:

    packs      copies that make a message contiguous
    exchange   all sends and receives, posted together; messages between a pair match in posting order
    unpacks    copies to where the bytes belong
    folds      n-ary reductions over operands in leaf order

Three buffers, named by ``Space``: the caller's input and output (they may be the same memory) and scratch.
"""

import enum
import hashlib
from dataclasses import dataclass
from functools import cached_property

from detcomm.association import Shape
from detcomm.call import Call
from detcomm.collectives import Accumulate


class Space(enum.Enum):
    """Which buffer a region lies in."""

    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class Region:
    """A run of bytes in one buffer."""

    space: Space
    offset: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.space.value}[{self.offset}:{self.offset + self.num_bytes}]"

    def overlaps(self, other: "Region") -> bool:
        """Whether the two share a byte. Input and output count as different buffers."""
        if self.space is not other.space or not (self.num_bytes and other.num_bytes):
            return False
        return self.offset < other.offset + other.num_bytes and other.offset < self.offset + self.num_bytes


@dataclass(frozen=True, slots=True)
class Message:
    """A region that goes to a peer, or comes from one."""

    peer: int
    region: Region


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy on this rank, every bit kept."""

    src: Region
    dst: Region


@dataclass(frozen=True, slots=True)
class Fold:
    """One n-ary reduction: ``inputs`` in leaf order, combined by ``shape``, stored once.

    Attributes:
        leaves: for each input, whether it is a rank's contribution in the tensor's type; otherwise it is a partial
            in the partial type (see ``collectives.partial_dtype``).
        count: elements.
        final: whether the output is the result (rounded to the tensor's type, divided for AVG) or a partial.
    """

    inputs: tuple[Region, ...]
    leaves: tuple[bool, ...]
    output: Region
    count: int
    shape: Shape
    final: bool


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One turn of the executor's loop.

    Attributes:
        gather: in place of messages, for executors whose transport has an all-gather: what this rank gives, and where
            the runs of all ranks go, equally long and in rank order.
    """

    packs: tuple[Copy, ...] = ()
    sends: tuple[Message, ...] = ()
    recvs: tuple[Message, ...] = ()
    unpacks: tuple[Copy, ...] = ()
    folds: tuple[Fold, ...] = ()
    gather: Copy | None = None


@dataclass(frozen=True)
class Plan:
    """What ``rank`` does for one call.

    Attributes:
        numerics_id: the name of the bits, ``tree/1:float32``.
        schedule: the schedule's text, ``staged(2,2)``.
        schedule_fingerprint: equal on all ranks of a call; ranks compare it.
        scratch_bytes: the scratch that the plan needs.
    """

    call: Call
    rank: int
    world_size: int
    numerics_id: str
    accumulate: Accumulate
    schedule: str
    schedule_fingerprint: str
    scratch_bytes: int
    steps: tuple[PlanStep, ...]

    @cached_property
    def fingerprint(self) -> str:
        """128 bits, in hexadecimal, over everything that this rank does."""
        return hashlib.blake2b(self.text().encode(), digest_size=16).hexdigest()

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to others."""
        messages = sum(message.region.num_bytes for step in self.steps for message in step.sends)
        gathered = sum(step.gather.src.num_bytes for step in self.steps if step.gather is not None)
        return messages + (self.world_size - 1) * gathered

    def text(self) -> str:
        """The plan as lines, one action a line; the form that the golden plans are kept in."""
        lines = [
            f"{self.call.text()} rank {self.rank} of {self.world_size}",
            f"numerics {self.numerics_id}  schedule {self.schedule}  scratch {self.scratch_bytes} bytes",
        ]
        for index, step in enumerate(self.steps):
            lines.append(f"step {index}")
            lines += [f"  pack   {copy.src} -> {copy.dst}" for copy in step.packs]
            lines += [f"  send   {message.region} -> rank {message.peer}" for message in step.sends]
            lines += [f"  recv   {message.region} <- rank {message.peer}" for message in step.recvs]
            if step.gather is not None:
                lines.append(f"  gather {step.gather.src} of all ranks -> {step.gather.dst}")
            lines += [f"  unpack {copy.src} -> {copy.dst}" for copy in step.unpacks]
            lines += [f"  fold   {_fold_text(fold)}" for fold in step.folds]
        return "\n".join(lines) + "\n"


def _fold_text(fold: Fold) -> str:
    operands = ", ".join(
        f"{'leaf' if leaf else 'partial'} {region}" for region, leaf in zip(fold.inputs, fold.leaves, strict=True)
    )
    kind = "result" if fold.final else "partial"
    return f"{fold.shape} x{fold.count} ({operands}) -> {kind} {fold.output}"
