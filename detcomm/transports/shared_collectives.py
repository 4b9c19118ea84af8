# SPDX-License-Identifier: Apache-2.0
"""Whole collectives over shared memory, one native call each: the call in native form, agreement, errors.

How a collective runs is ``native/src/shm_collectives.cpp``'s business.
"""

import ctypes
import hashlib
from typing import NoReturn

from detcomm import native, native_shm
from detcomm.association import TREE, Association
from detcomm.call import Call
from detcomm.collectives import Accumulate, Collective, DType, ReduceOp
from detcomm.errors import MismatchError
from detcomm.header import call_text, ranks_text
from detcomm.transports.base import Bytes
from detcomm.transports.shared_group import SharedGroup

_CACHED_CALLS = 1024
_NEXT_CALL = "\n"
_WORD_SUM = Call(Collective.ALL_REDUCE, DType.UINT64, 1, ReduceOp.SUM)

# The numbers of detcomm_shm.h; those of types and operations are detcomm.h's.
_COLLECTIVES = {
    Collective.ALL_REDUCE: 0,
    Collective.REDUCE_SCATTER: 1,
    Collective.ALL_GATHER: 2,
    Collective.REDUCE: 3,
}


class SharedCollectives:
    """``NativeCollectives`` of one group."""

    def __init__(self, group: SharedGroup) -> None:
        self._group = group
        # By identity, which spares hashing the call; an entry keeps its call alive, so the identity is its own.
        self._prepared: dict[int, _Prepared] = {}
        self._word_sums: dict[str, _Prepared] = {}

    def run(
        self,
        call: Call,
        association: Association,
        accumulate: Accumulate,
        input: Bytes,
        output: Bytes,
        *,
        factor: float | None = None,
        label: str = "",
        timeout_s: float,
    ) -> None:
        """See ``NativeCollectives.run``."""
        prepared = self.prepare(call, association, accumulate, label)
        source: int = input.__array_interface__["data"][0]
        target: int = output.__array_interface__["data"][0]
        offset = target - source
        if -output.size < offset < input.size and offset != prepared.in_place_offset and output.size:
            input = input.copy()  # they overlap in some other way
            source = input.__array_interface__["data"][0]
        status = self._group.collective(prepared.reference, source, target, factor or 0.0, timeout_s)
        if status != native_shm.OK:
            self._refuse(prepared, status, timeout_s)

    def prepare(self, call: Call, association: Association, accumulate: Accumulate, label: str) -> "_Prepared":
        """See ``NativeCollectives.prepare``."""
        prepared = self._prepared.get(id(call))
        if prepared is not None and prepared.serves(call, association, accumulate, label):
            return prepared
        if len(self._prepared) >= _CACHED_CALLS:
            self._prepared.clear()
        prepared = _Prepared(call, association, accumulate, label, self._group.rank, self._group.world_size)
        self._prepared[id(call)] = prepared
        return prepared

    def run_prepared(self, prepared: "_Prepared", source: int, target: int, timeout_s: float) -> None:
        """See ``NativeCollectives.run_prepared``."""
        status = self._group.collective(prepared.reference, source, target, 0.0, timeout_s)
        if status != native_shm.OK:
            self._refuse(prepared, status, timeout_s)

    def agree(self, text: str, timeout_s: float, remainder: int | None = None) -> int:
        """See ``NativeCollectives.agree``."""
        if remainder is not None:
            word = ctypes.c_uint64(remainder)
            self.run_prepared(self._word_sum(text), ctypes.addressof(word), ctypes.addressof(word), timeout_s)
            return word.value
        status = self._group.agree(_digest(f"block\n{text}"), timeout_s)
        if status == native_shm.MISMATCH:
            self._raise_mismatch(text, timeout_s)
        if status != native_shm.OK:
            error = self._group.failure(status, timeout_s)
            raise type(error)(f"agreement: {error}")
        return 0

    def _word_sum(self, text: str) -> "_Prepared":
        """The sum of one word of each rank, under a text of its own."""
        known = self._word_sums.get(text)
        if known is None:
            if len(self._word_sums) >= _CACHED_CALLS:
                self._word_sums.clear()
            group = self._group
            known = _Prepared(_WORD_SUM, TREE, "float32", "", group.rank, group.world_size, text)
            self._word_sums[text] = known
        return known

    def _refuse(self, prepared: "_Prepared", status: int, timeout_s: float) -> NoReturn:
        if status == native_shm.MISMATCH:
            self._raise_mismatch(prepared.text, timeout_s)
        error = self._group.failure(status, timeout_s)
        raise type(error)(f"{prepared.text}: {error}")

    def _raise_mismatch(self, text: str, timeout_s: float) -> NoReturn:
        """Every rank has seen the digests differ, and comes here to say what it wanted."""
        texts = self._group.gather_texts(text, timeout_s)
        raise MismatchError(f"the ranks disagree{_difference([said.split(_NEXT_CALL) for said in texts])}")


def _difference(blocks: list[list[str]]) -> str:
    """The first of the coalesced calls, mostly there is but one, on which the ranks differ, and who says what."""
    for index in range(max(map(len, blocks))):
        said: dict[str, list[int]] = {}
        for rank, block in enumerate(blocks):
            said.setdefault(block[index] if index < len(block) else "no further call", []).append(rank)
        if len(said) > 1:
            where = f" on call {index + 1} of a coalesced block" if max(map(len, blocks)) > 1 else ""
            return f"{where}: " + "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in said.items())
    return ": some coalesce these calls, and others do not"


class _Prepared:
    """A call in the native library's form."""

    __slots__ = ("_contract", "_shards", "_structure", "call", "in_place_offset", "reference", "text")

    def __init__(
        self,
        call: Call,
        association: Association,
        accumulate: Accumulate,
        label: str,
        rank: int,
        world_size: int,
        text: str = "",
    ) -> None:
        self.call = call
        self._contract = (association, accumulate, label)
        self.text = text or f"{call_text(call, label)} {association.numerics_id(accumulate)}"
        shards = call.shard_counts
        self._shards = None if shards is None else (ctypes.c_uint64 * (world_size + 1))(*call.shard_starts, call.count)
        structure = native_shm.NativeCall(
            collective=_COLLECTIVES[call.collective],
            dtype=native.DTYPES[call.dtype],
            op=0 if call.op is None else native.OPS[call.op],
            accumulate=native.ACCUMULATE[accumulate],
            shape=native.SHAPES[association.shape],
            premultiply=int(call.op is ReduceOp.PREMUL_SUM),
            root=call.root,
            item_bytes=call.dtype.itemsize,
            ring_chunk_elems=association.ring_chunk_elems if association.name == "ring" else 0,
            count=call.count,
        )
        structure.digest[:] = _digest(self.text)
        if self._shards is not None:
            structure.shards = ctypes.cast(self._shards, ctypes.POINTER(ctypes.c_uint64))
        self._structure = structure
        self.reference = ctypes.byref(structure)
        # Where the output may lie in the input's memory: the same place, or this rank's shard of the larger one.
        shard_offset = 0 if shards is None else call.shard_starts[rank] * call.dtype.itemsize
        self.in_place_offset = -shard_offset if call.collective is Collective.ALL_GATHER else shard_offset

    def serves(self, call: Call, association: Association, accumulate: Accumulate, label: str) -> bool:
        """Whether this is the native form of that call."""
        known_association, known_accumulate, known_label = self._contract
        return (
            self.call is call
            and (known_association is association or known_association == association)
            and known_accumulate == accumulate
            and known_label == label
        )


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=native_shm.DIGEST_BYTES).digest()
