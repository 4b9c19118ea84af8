# SPDX-License-Identifier: Apache-2.0
"""The header that ranks exchange before a collective: 256 bytes that say what this rank is about to do.

Little-endian, one layout for ever under one version number:

    magic 8 | version 2 | collective 1 | operation 1 | root 4 | sequence 8 | count 8 | calls 4 | bytes of texts 4 |
    shards 16 | calls' digest 16 | schedule 16 | options 16 | dtype 32 | numerics id 64 | zeros to 256

Knows the bytes and how to put a difference into words; sends nothing.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from detcomm import movement_call
from detcomm.call import Call
from detcomm.collectives import Collective, ReduceOp
from detcomm.movement_call import MOVEMENTS, MovementCall

HEADER_BYTES = 256
VERSION = 1
DTYPE_BYTES = 32
DIGEST_BYTES = 16

_MAGIC = b"detcomm\0"
_LAYOUT = struct.Struct("<8sHBBIQQII16s16s16s16s32s64s")
_SEQUENCE = struct.Struct("<Q")
_SEQUENCE_OFFSET = 16
_PADDING = bytes(HEADER_BYTES - _LAYOUT.size)

# Part of the layout: a number is never given to another name.
_COLLECTIVES = {
    Collective.ALL_REDUCE.value: 1,
    Collective.REDUCE_SCATTER.value: 2,
    Collective.ALL_GATHER.value: 3,
    Collective.REDUCE.value: 4,
    movement_call.BROADCAST: 5,
    movement_call.GATHER: 6,
    movement_call.SCATTER: 7,
    movement_call.ALL_TO_ALL: 8,
    movement_call.BARRIER: 9,
}
_OPS: dict[ReduceOp | None, int] = {
    None: 0,
    ReduceOp.SUM: 1,
    ReduceOp.AVG: 2,
    ReduceOp.PRODUCT: 3,
    ReduceOp.MIN: 4,
    ReduceOp.MAX: 5,
    ReduceOp.PREMUL_SUM: 6,
    ReduceOp.BAND: 7,
    ReduceOp.BOR: 8,
    ReduceOp.BXOR: 9,
}
_COLLECTIVE_NAMES = {number: name for name, number in _COLLECTIVES.items()}
_OP_NAMES = {number: op.value if op else "" for op, number in _OPS.items()}


def digest(text: str) -> bytes:
    """128 bits that stand for a text that does not fit a header."""
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Header:
    """What a rank is about to do, as the others see it.

    For several coalesced calls the fields of a call are those of the first, ``num_calls`` tells how many there
    are, and ``calls`` is the digest of all their texts, ``texts_bytes`` long.
    """

    collective: str
    op: str
    dtype: str
    count: int
    root: int
    shards: bytes
    num_calls: int
    calls: bytes
    texts_bytes: int
    numerics_id: str
    schedule: bytes
    options: bytes
    sequence: int = 0

    def encode(self) -> bytes:
        """The 256 bytes."""
        collective = _COLLECTIVES[self.collective]
        op = next(number for number, name in _OP_NAMES.items() if name == self.op)
        return (
            _LAYOUT.pack(
                _MAGIC,
                VERSION,
                collective,
                op,
                self.root,
                self.sequence,
                self.count,
                self.num_calls,
                self.texts_bytes,
                self.shards,
                self.calls,
                self.schedule,
                self.options,
                self.dtype.encode()[:DTYPE_BYTES],  # to be read; ``calls`` covers what is cut off
                self.numerics_id.encode(),
            )
            + _PADDING
        )

    @classmethod
    def decode(cls, data: bytes) -> "Header | None":
        """The header in these bytes, or ``None`` if they hold none of this version."""
        magic, version, collective, op, root, sequence, count, num_calls, texts_bytes, *rest = _LAYOUT.unpack_from(data)
        if magic != _MAGIC or version != VERSION or collective not in _COLLECTIVE_NAMES or op not in _OP_NAMES:
            return None
        shards, calls, schedule, options, dtype, numerics_id = rest
        return cls(
            collective=_COLLECTIVE_NAMES[collective],
            op=_OP_NAMES[op],
            dtype=_text(dtype),
            count=count,
            root=root,
            shards=shards,
            num_calls=num_calls,
            calls=calls,
            texts_bytes=texts_bytes,
            numerics_id=_text(numerics_id),
            schedule=schedule,
            options=options,
            sequence=sequence,
        )

    def text(self) -> str:
        """``all_reduce(sum, float32[1000])``, and how many more calls follow it in a coalesced block."""
        if self.collective in MOVEMENTS:
            return MovementCall(self.collective, self.dtype, self.count, self.root).text()
        op = f"{self.op}, " if self.op else ""
        root = f", root {self.root}" if self.collective == Collective.REDUCE.value else ""
        more = f" and {self.num_calls - 1} more calls" if self.num_calls > 1 else ""
        return f"{self.collective}({op}{self.dtype}[{self.count}]{root}){more}"


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")


def call_text(call: Call, label: str) -> str:
    """Everything of a call that the ranks must agree on, in one line."""
    name = f" of {label}" if label else ""
    shards = f" shards {','.join(map(str, call.shard_counts))}" if call.shard_counts is not None else ""
    return f"{call.text()}{name}{shards}"


def header_for(
    calls: Sequence[Call],
    labels: Sequence[str],
    *,
    numerics_id: str,
    schedule_fingerprint: str,
    options: bytes,
) -> Header:
    """The header of one call, or of several coalesced ones; its sequence number is set later."""
    first = calls[0]
    texts = "\n".join(call_text(call, label) for call, label in zip(calls, labels, strict=True))
    return Header(
        collective=first.collective.value,
        op=first.op.value if first.op else "",
        dtype=labels[0] or first.dtype.value,
        count=first.count,
        root=first.root,
        shards=bytes(DIGEST_BYTES) if first.shard_counts is None else digest(str(first.shard_counts)),
        num_calls=len(calls),
        calls=digest(texts),
        texts_bytes=len(texts.encode()),
        numerics_id=numerics_id,
        schedule=digest(schedule_fingerprint),
        options=options,
    )


def header_of_movement(call: MovementCall, numerics_id: str, options: bytes) -> Header:
    """The header of a movement, which has neither operation nor schedule."""
    text = call.text()
    return Header(
        collective=call.name,
        op="",
        dtype=call.dtype,
        count=call.count,
        root=call.root,
        shards=bytes(DIGEST_BYTES),
        num_calls=1,
        calls=digest(text),
        texts_bytes=len(text.encode()),
        numerics_id=numerics_id,
        schedule=digest(""),
        options=options,
    )


def with_sequence(encoded: bytes, sequence: int) -> bytes:
    """An encoded header with another sequence number."""
    end = _SEQUENCE_OFFSET + _SEQUENCE.size
    return encoded[:_SEQUENCE_OFFSET] + _SEQUENCE.pack(sequence) + encoded[end:]


def describe_difference(encoded: Sequence[bytes]) -> str:
    """What differs between the headers of all ranks, in words: which fields, and who says what.

    A function of the headers alone, so that every rank raises the same text.
    """
    headers = [Header.decode(data) for data in encoded]
    known = [header for header in headers if header is not None]
    names = [field.name for field in fields(Header)]
    differing = [name for name in names if len({getattr(header, name) for header in known}) > 1]
    said: dict[str, list[int]] = {}
    for rank, header in enumerate(headers):
        said.setdefault(_say(header, differing), []).append(rank)
    about = ", ".join(_WORDS.get(name, name) for name in differing if not _implied(name, differing))
    verdicts = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in said.items())
    return f"the ranks disagree on {about or 'the format of headers'}: {verdicts}"


_WORDS = {
    "numerics_id": "numerics",
    "num_calls": "number of calls",
    "calls": "calls",
    "sequence": "sequence number",
    "op": "operation",
}


def _implied(name: str, differing: Sequence[str]) -> bool:
    """Whether a difference only follows from another one that is named already."""
    own = {"collective", "op", "dtype", "count", "root", "num_calls"}
    if name == "texts_bytes":
        return True
    if name in ("calls", "shards"):
        covered = own | ({"shards"} if name == "calls" else set())
        return not covered.isdisjoint(differing)
    if name == "schedule":
        return not (own | {"shards", "calls", "numerics_id", "options"}).isdisjoint(differing)
    return False


def _say(header: Header | None, differing: Sequence[str]) -> str:
    if header is None:
        return "no header of this version of detcomm"
    parts = [header.text()]
    if "numerics_id" in differing:
        parts.append(header.numerics_id)
    for name in ("shards", "calls", "schedule", "options"):
        if name in differing and not _implied(name, differing):
            parts.append(f"{name} {getattr(header, name).hex()[:12]}")
    if "sequence" in differing:
        parts.append(f"sequence number {header.sequence}")
    return " ".join(parts)


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 2-5``: ascending ranks, runs of three or more shortened."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    return f"rank {parts[0]}" if parts and len(runs) == 1 and len(runs[0]) == 1 else f"ranks {', '.join(parts)}"
