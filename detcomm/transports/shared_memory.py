# SPDX-License-Identifier: Apache-2.0
"""The ranks of one host over shared memory: whole collectives in one native call, and ``exchange`` for any plan.

How the ranks find each other's segments is ``shared_memory_rendezvous``'s business; how a collective runs is
``native/src/shm_collectives.cpp``'s.
"""

import ctypes
import hashlib
import os
import threading
from collections.abc import Sequence
from typing import Any

from detcomm import native, native_shm
from detcomm.association import Association
from detcomm.call import Call
from detcomm.collectives import Accumulate, Collective, ReduceOp
from detcomm.errors import DetcommError, MismatchError, PeerTimeoutError, TransportError, UsageError
from detcomm.header import call_text, ranks_text
from detcomm.transports.base import Bytes, Parcel, Transport
from detcomm.transports.memory_segment import Mapping, OwnSegment

CHUNK_BYTES = 512 << 10
ONESHOT_BYTES = 32 << 10
MAILBOX_BYTES = 64 << 10
_LINE_BYTES = 64
_SPIN_NS = 300_000
_SPIN_CROWDED_NS = 1_000
_CACHED_CALLS = 1024

# The numbers of detcomm_shm.h; those of types and operations are detcomm.h's.
_COLLECTIVES = {
    Collective.ALL_REDUCE: 0,
    Collective.REDUCE_SCATTER: 1,
    Collective.ALL_GATHER: 2,
    Collective.REDUCE: 3,
}


def tuning_for(world_size: int, chunk_bytes: int | None, num_cores: int) -> native_shm.Tuning:
    """Sizes for a group. All but the spin must be equal on its ranks, and follow from what is equal there.

    Args:
        chunk_bytes: the option, rounded up to what the layout needs; ``None`` for the default.
        num_cores: cores that the group's ranks may run on together.
    """
    wanted = CHUNK_BYTES if chunk_bytes is None else chunk_bytes
    least = _LINE_BYTES * world_size
    chunk = max(least, -(-wanted // _LINE_BYTES) * _LINE_BYTES)
    # With a core for every rank a peer is running, and will come soon. Otherwise it needs the core we would spin on.
    spin_ns = _SPIN_NS if world_size <= num_cores else _SPIN_CROWDED_NS
    return native_shm.Tuning(chunk, ONESHOT_BYTES, MAILBOX_BYTES, spin_ns)


def segment_bytes(world_size: int, tuning: native_shm.Tuning) -> int:
    """Bytes of one rank's segment."""
    num_bytes: int = native_shm.functions().dc_shm_segment_bytes(world_size, ctypes.byref(tuning))
    if num_bytes == 0:
        raise UsageError(f"shared memory takes 2 to {native_shm.MAX_RANKS} ranks, got {world_size}")
    return num_bytes


class SharedMemoryTransport(Transport):
    """One rank of a group whose segments are all mapped.

    Args:
        own: this rank's segment; owned from now on, like all that follows.
        peers: the other ranks' segments, by rank.
        pidfds: a descriptor of each other rank's process, by rank.
        tuning: see ``tuning_for``.
    """

    name = "shared_memory"

    def __init__(
        self,
        rank: int,
        world_size: int,
        own: OwnSegment,
        peers: dict[int, Mapping],
        pidfds: dict[int, int],
        tuning: native_shm.Tuning,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._own = own
        self._peers = peers
        self._pidfds = pidfds
        self._functions = native_shm.functions()
        addresses = [own.mapping.address if peer == rank else peers[peer].address for peer in range(world_size)]
        descriptors = [pidfds.get(peer, -1) for peer in range(world_size)]
        self._group: int | None = self._functions.dc_shm_open(
            rank,
            world_size,
            (ctypes.c_void_p * world_size)(*addresses),
            (ctypes.c_int32 * world_size)(*descriptors),
            ctypes.byref(tuning),
        )
        if self._group is None:
            raise UsageError(f"shared memory: rank {rank} of {world_size} ranks cannot be opened")
        # Held by every native call and by close: nothing is unmapped under a running call.
        self._in_use = threading.Lock()
        self._may_abort = threading.Lock()
        self.native_collectives = _Collectives(self)

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], timeout_s: float) -> None:
        outgoing, incoming = _native_parcels(sends), _native_parcels(recvs)
        with self._in_use:
            status = self._functions.dc_shm_exchange(
                self._open_group(), outgoing, len(sends), incoming, len(recvs), timeout_s
            )
        if status != native_shm.OK:
            raise self.failure(status, timeout_s)

    def close(self) -> None:
        # Only a running call is a reason to abort: peers may still be at the end of one that this rank has finished.
        if not self._in_use.acquire(blocking=False):
            self.abort("the shared-memory transport was closed during a call")
            self._in_use.acquire()
        try:
            with self._may_abort:
                self._release()
        finally:
            self._in_use.release()

    def _release(self) -> None:
        if self._group is None:
            return
        self._functions.dc_shm_close(self._group)
        self._group = None
        for mapping in self._peers.values():
            mapping.close()
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._own.close()

    def abort(self, reason: str) -> None:
        with self._may_abort:  # but not _in_use: that is the call to end
            if self._group is not None:
                self._functions.dc_shm_abort(self._group, _fitting(reason))

    def run(self, name: str, *arguments: Any) -> int:
        """One native call on the group, by the name of its function; its status."""
        with self._in_use:
            status: int = getattr(self._functions, name)(self._open_group(), *arguments)
        return status

    def failure(self, status: int, timeout_s: float) -> DetcommError:
        """The error that a status means, naming those whom the group's fault record blames."""
        if status == native_shm.USAGE:
            return UsageError("shared memory: the native library refused an argument; nothing was sent")
        fault = native_shm.Fault()
        with self._in_use:
            self._functions.dc_shm_get_fault(self._open_group(), ctypes.byref(fault))
        culprits = ranks_text(sorted(fault.culprits[: fault.num_culprits]))
        text = fault.text.decode(errors="replace")
        own = fault.reporter == self.rank
        if fault.status == native_shm.TIMEOUT:
            limit = f" {timeout_s:g} s" if own else ""
            return PeerTimeoutError(f"rank {fault.reporter} waited{limit} for {culprits}")
        if fault.status == native_shm.ABORTED:
            return TransportError(text if own else f"rank {fault.reporter} gave up: {text}")
        return TransportError(f"rank {fault.reporter} lost {culprits}: {text}")

    def _open_group(self) -> int:
        if self._group is None:
            raise TransportError("the shared-memory transport is closed")
        return self._group


class _Collectives:
    """``NativeCollectives`` of one group."""

    def __init__(self, transport: SharedMemoryTransport) -> None:
        self._transport = transport
        # By identity, which spares hashing the call; an entry keeps its call alive, so the identity is its own.
        self._prepared: dict[int, _Prepared] = {}

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
        prepared = self._prepared.get(id(call))
        if prepared is None or not prepared.serves(call, association, accumulate, label):
            prepared = self._prepare(call, association, accumulate, label)
        source: int = input.__array_interface__["data"][0]
        target: int = output.__array_interface__["data"][0]
        offset = target - source
        if -output.size < offset < input.size and offset != prepared.in_place_offset and output.size:
            input = input.copy()  # they overlap in some other way
            source = input.__array_interface__["data"][0]
        status = self._transport.run("dc_shm_run", prepared.reference, source, target, factor or 0.0, timeout_s)
        if status == native_shm.OK:
            return
        if status == native_shm.MISMATCH:
            self._raise_mismatch(prepared.text, timeout_s)
        error = self._transport.failure(status, timeout_s)
        raise type(error)(f"{prepared.text}: {error}")

    def agree(self, text: str, timeout_s: float) -> None:
        """See ``NativeCollectives.agree``."""
        status = self._transport.run("dc_shm_agree", _digest(f"block\n{text}"), timeout_s)
        if status == native_shm.MISMATCH:
            self._raise_mismatch(text, timeout_s)
        if status != native_shm.OK:
            error = self._transport.failure(status, timeout_s)
            raise type(error)(f"agreement: {error}")

    def _prepare(self, call: Call, association: Association, accumulate: Accumulate, label: str) -> "_Prepared":
        if len(self._prepared) >= _CACHED_CALLS:
            self._prepared.clear()
        transport = self._transport
        prepared = _Prepared(call, association, accumulate, label, transport.rank, transport.world_size)
        self._prepared[id(call)] = prepared
        return prepared

    def _raise_mismatch(self, text: str, timeout_s: float) -> None:
        """Every rank has seen the digests differ, and comes here to say what it wanted."""
        world_size = self._transport.world_size
        everybody = ctypes.create_string_buffer(world_size * native_shm.TEXT_BYTES)
        own = _fitting(text).ljust(native_shm.TEXT_BYTES, b"\0")
        status = self._transport.run("dc_shm_gather_texts", own, everybody, timeout_s)
        if status != native_shm.OK:
            raise self._transport.failure(status, timeout_s)
        said: dict[str, list[int]] = {}
        for rank in range(world_size):
            start = rank * native_shm.TEXT_BYTES
            line = everybody.raw[start : start + native_shm.TEXT_BYTES].rstrip(b"\0").decode(errors="replace")
            said.setdefault(line, []).append(rank)
        verdicts = "; ".join(f"{ranks_text(ranks)}: {line}" for line, ranks in said.items())
        raise MismatchError(f"the ranks disagree: {verdicts}")


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
    ) -> None:
        self.call = call
        self._contract = (association, accumulate, label)
        numerics_id = association.numerics_id(accumulate)
        self.text = f"{call_text(call, label)} {numerics_id}"
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


def _native_parcels(parcels: Sequence[Parcel]) -> ctypes.Array[native_shm.NativeParcel]:
    array = (native_shm.NativeParcel * len(parcels))()
    for structure, parcel in zip(array, parcels, strict=True):
        structure.peer = parcel.peer
        structure.data = parcel.data.__array_interface__["data"][0]
        structure.num_bytes = parcel.data.size
    return array


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=native_shm.DIGEST_BYTES).digest()


def _fitting(text: str) -> bytes:
    """The text as the native library takes it, cut to its room."""
    return text.encode()[: native_shm.TEXT_BYTES - 1]
