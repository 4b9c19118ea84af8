# SPDX-License-Identifier: Apache-2.0
"""The native side of one rank of a group over shared memory: one handle, its calls, and what its faults mean.

Knows nothing of what the calls do; see ``native/include/detcomm_shm.h``.
"""

import ctypes
import os
import threading
from collections.abc import Sequence
from typing import Any

from detcomm import native_shm
from detcomm.errors import DetcommError, PeerTimeoutError, TransportError, UsageError
from detcomm.header import ranks_text
from detcomm.transports.memory_segment import Mapping, OwnSegment

CHUNK_BYTES = 512 << 10
ONESHOT_BYTES = 32 << 10
MAILBOX_BYTES = 64 << 10
_LINE_BYTES = 64
_SPIN_NS = 50_000
_SPIN_CROWDED_NS = 1_000
_YIELD_NS = 500_000
_SLICE_NS = 20_000
_SLICE_CROWDED_NS = 500_000


def tuning_for(world_size: int, chunk_bytes: int | None, num_cores: int) -> native_shm.Tuning:
    """Sizes for a group. All but the spin must be equal on its ranks, and follow from what is equal there.

    Args:
        chunk_bytes: the option, rounded up to what the layout needs; ``None`` for the default.
        num_cores: cores that the group's ranks may run on together.
    """
    wanted = CHUNK_BYTES if chunk_bytes is None else chunk_bytes
    least = _LINE_BYTES * world_size
    chunk = max(least, -(-wanted // _LINE_BYTES) * _LINE_BYTES)
    # With a core for every rank a peer is running, and will come soon; a yield that lets somebody run tells that two
    # ranks have come to one core. Otherwise a peer needs the core we would spin on; only a lost time slice is too dear.
    has_core = world_size <= num_cores
    spin_ns, slice_ns = (_SPIN_NS, _SLICE_NS) if has_core else (_SPIN_CROWDED_NS, _SLICE_CROWDED_NS)
    return native_shm.Tuning(chunk, ONESHOT_BYTES, MAILBOX_BYTES, spin_ns, _YIELD_NS, slice_ns)


def segment_bytes(world_size: int, tuning: native_shm.Tuning) -> int:
    """Bytes of one rank's segment."""
    num_bytes: int = native_shm.functions().dc_shm_segment_bytes(world_size, ctypes.byref(tuning))
    if num_bytes == 0:
        raise UsageError(f"shared memory takes 2 to {native_shm.MAX_RANKS} ranks, got {world_size}")
    return num_bytes


class SharedGroup:
    """One rank of a group whose segments are all mapped. All but ``abort`` is for one thread at a time.

    Args:
        own: this rank's segment; owned from now on, like all that follows.
        peers: the other ranks' segments, by rank.
        pidfds: a descriptor of each other rank's process, by rank.
        own_heap: this process's shared allocations, not owned; ``None`` if some rank cannot see all heaps.
        heaps: the other ranks' shared allocations, by rank; empty if some rank cannot see all.
        tuning: see ``tuning_for``.
        names: by which errors call the ranks: their numbers in the larger group that these are a part of.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        own: OwnSegment,
        peers: dict[int, Mapping],
        pidfds: dict[int, int],
        own_heap: Mapping | None,
        heaps: dict[int, Mapping],
        tuning: native_shm.Tuning,
        names: Sequence[int],
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._names = tuple(names)
        self._own = own
        self._peers = peers
        self._pidfds = pidfds
        self._heaps = heaps
        self._functions = native_shm.functions()
        addresses = [own.mapping.address if peer == rank else peers[peer].address for peer in range(world_size)]
        descriptors = [pidfds.get(peer, -1) for peer in range(world_size)]
        everybody = heaps if own_heap is None else heaps | {rank: own_heap}
        heap_addresses = [everybody[peer].address if peer in everybody else None for peer in range(world_size)]
        heap_bytes = [everybody[peer].num_bytes if peer in everybody else 0 for peer in range(world_size)]
        self._handle: int | None = self._functions.dc_shm_open(
            rank,
            world_size,
            (ctypes.c_void_p * world_size)(*addresses),
            (ctypes.c_int32 * world_size)(*descriptors),
            (ctypes.c_void_p * world_size)(*heap_addresses),
            (ctypes.c_uint64 * world_size)(*heap_bytes),
            ctypes.byref(tuning),
        )
        if self._handle is None:
            raise UsageError(f"shared memory: rank {self._names[rank]} of {world_size} ranks cannot be opened")
        # Held by every native call and by close: nothing is unmapped under a running call.
        self._in_use = threading.Lock()
        self._may_abort = threading.Lock()
        self._run = self._functions.dc_shm_run

    def collective(self, call: Any, input: int, output: int, factor: float, timeout_s: float) -> int:
        """``dc_shm_run``; its status."""
        with self._in_use:
            status: int = self._run(self._handle or self._open_handle(), call, input, output, factor, timeout_s)
        return status

    def exchange(
        self,
        sends: "ctypes.Array[native_shm.NativeParcel]",
        recvs: "ctypes.Array[native_shm.NativeParcel]",
        timeout_s: float,
    ) -> int:
        """``dc_shm_exchange``; its status."""
        with self._in_use:
            status: int = self._functions.dc_shm_exchange(
                self._open_handle(), sends, len(sends), recvs, len(recvs), timeout_s
            )
        return status

    def agree(self, digest: bytes, timeout_s: float) -> int:
        """``dc_shm_agree``; its status."""
        with self._in_use:
            status: int = self._functions.dc_shm_agree(self._open_handle(), digest, timeout_s)
        return status

    def gather_texts(self, text: str, timeout_s: float) -> list[str]:
        """Every rank's text, whatever their lengths, in as many rounds as the longest one takes.

        Raises:
            TransportError: a peer is lost or late.
        """
        encoded = text.encode()
        header_bytes, room = 8, native_shm.TEXT_BYTES - 8
        parts: list[list[bytes]] = [[] for _ in range(self.world_size)]
        num_rounds, done = 1, 0
        while done < num_rounds:
            own = len(encoded).to_bytes(header_bytes, "little") + encoded[done * room : (done + 1) * room]
            everybody = ctypes.create_string_buffer(self.world_size * native_shm.TEXT_BYTES)
            with self._in_use:
                status = self._functions.dc_shm_gather_texts(
                    self._open_handle(), own.ljust(native_shm.TEXT_BYTES, b"\0"), everybody, timeout_s
                )
            if status != native_shm.OK:
                raise self.failure(status, timeout_s)
            raw = everybody.raw
            for rank, own_parts in enumerate(parts):
                slot = raw[rank * native_shm.TEXT_BYTES : (rank + 1) * native_shm.TEXT_BYTES]
                size = int.from_bytes(slot[:header_bytes], "little")
                own_parts.append(slot[header_bytes : header_bytes + max(0, min(size - done * room, room))])
                num_rounds = max(num_rounds, -(-size // room))  # equal on all ranks, which all see all sizes
            done += 1
        return [b"".join(own_parts).decode(errors="replace") for own_parts in parts]

    def close(self) -> None:
        """Leave the group and unmap everything. Idempotent; never waits for a peer."""
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
        if self._handle is None:
            return
        self._functions.dc_shm_close(self._handle)
        self._handle = None
        for mapping in (*self._peers.values(), *self._heaps.values()):
            mapping.close()
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._own.close()

    def abort(self, reason: str) -> None:
        """End a running call of another thread, here and on all ranks, and every later one. From any thread."""
        with self._may_abort:  # but not _in_use: that is the call to end
            if self._handle is not None:
                self._functions.dc_shm_abort(self._handle, _fitting(reason))

    def failure(self, status: int, timeout_s: float) -> DetcommError:
        """The error that a status means, naming those whom the group's fault record blames."""
        if status == native_shm.USAGE:
            return UsageError("shared memory: the native library refused an argument; nothing was sent")
        fault = native_shm.Fault()
        with self._in_use:
            self._functions.dc_shm_get_fault(self._open_handle(), ctypes.byref(fault))
        culprits = ranks_text(sorted(self._names[rank] for rank in fault.culprits[: fault.num_culprits]))
        reporter = self._names[fault.reporter]
        text = fault.text.decode(errors="replace")
        own = fault.reporter == self.rank
        if fault.status == native_shm.TIMEOUT:
            limit = f" {timeout_s:g} s" if own else ""
            return PeerTimeoutError(f"rank {reporter} waited{limit} for {culprits}")
        if fault.status == native_shm.ABORTED:
            return TransportError(text if own else f"rank {reporter} gave up: {text}")
        return TransportError(f"rank {reporter} lost {culprits}: {text}")

    def _open_handle(self) -> int:
        if self._handle is None:
            raise TransportError("the shared-memory transport is closed")
        return self._handle


def _fitting(text: str) -> bytes:
    """The text as the native library takes it, cut to its room."""
    return text.encode()[: native_shm.TEXT_BYTES - 1]
