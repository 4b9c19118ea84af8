# SPDX-License-Identifier: Apache-2.0
"""What carries a group's bytes on one device: NCCL, peers' memory, both, or a stock group's calls; made and ended here.

Which ranks are reached through memory is agreed by all ranks when a group connects. Knows how to issue a program, not
what is in it.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from detcomm.cuda.events import EventPool
from detcomm.cuda.kernels import Kernels
from detcomm.cuda.libraries import capture_id, driver, nccl
from detcomm.cuda.native import MAX_PEERS
from detcomm.cuda.native_call import NativeCall, Order, Streams
from detcomm.cuda.nccl import NcclCommunicator
from detcomm.cuda.peer.fused import MOST_BLOCKS
from detcomm.cuda.peer.path import LEAST_FOR_FUSED, LEAST_STAGING_BYTES, STAGING_BYTES, PeerPath
from detcomm.cuda.peer.residency import agree_on_blocks, give_back
from detcomm.cuda.peer_memory.connect import Refusal, connect_peer_memory
from detcomm.cuda.peer_memory.memory import PeerMemory
from detcomm.cuda.prepared import Prepared, PreparedCalls
from detcomm.cuda.program import failure_text
from detcomm.cuda.reference_call import Mover, ReferenceCall
from detcomm.errors import NativeError, UsageError
from detcomm.options import Options

_log = logging.getLogger("detcomm")


class Membership(NamedTuple):
    """A group as one of its ranks sees it.

    Attributes:
        name: for messages.
        store: gives a key space of this group and device by its name.
        block_size: ranks of one aligned block that share a host.
        options: equal on all ranks.
        failure: the group's first error, once there is one.
        timeout_s: for peers to come.
    """

    name: str
    store: Callable[[str], Any]
    rank: int
    world_size: int
    block_size: int
    options: Options
    failure: Callable[[], BaseException | None]
    timeout_s: float


def connect_peers(member: Membership, kernels: Kernels) -> PeerPath | None:
    """Map the memory of the ranks of a block, if the options ask for it and all ranks can; together with all ranks.

    Raises:
        UsageError: ``cuda_transport=peer``, and it is not possible; on all ranks.
        PeerTimeoutError: not all ranks came.
    """
    options = member.options
    if member.world_size == 1 or options.cuda_transport == "nccl":
        return None
    staging_bytes = min(options.scratch_bytes, STAGING_BYTES)
    memory: PeerMemory | Refusal
    if min(member.block_size, member.world_size) > MAX_PEERS:
        memory = Refusal(f"blocks of {member.block_size} ranks; expected at most {MAX_PEERS}")
    elif options.cuda_transport == "auto" and staging_bytes < LEAST_STAGING_BYTES:
        memory = Refusal(f"scratch_bytes is {options.scratch_bytes}; expected at least {LEAST_STAGING_BYTES}")
    else:
        memory = connect_peer_memory(
            member.store("peer"), member.name, member.rank, member.world_size, member.block_size, kernels.device,
            kernels.make_current, staging_bytes, member.failure, member.timeout_s,
        )  # fmt: skip
    if not isinstance(memory, Refusal):
        most_blocks = 0
        if len(memory.ranks) == member.world_size and staging_bytes >= LEAST_FOR_FUSED:
            most_blocks = agree_on_blocks(
                member.store("blocks"), member.rank, member.world_size, kernels, MOST_BLOCKS, member.timeout_s,
                lambda: member.failure() is not None,
            )  # fmt: skip
        return PeerPath(memory, member.timeout_s, most_blocks, partial(give_back, kernels.device, most_blocks))
    if options.cuda_transport == "peer":
        raise UsageError(f"group {member.name}: cuda_transport=peer, but its ranks share no memory: {memory.reason}")
    _log.info("group %s: NCCL carries the messages inside a host, too: %s", member.name, memory.reason)
    return None


class Carrier:
    """One group's transport on one device.

    Args:
        mover: moves the bytes, for the reference path.

    Attributes:
        calls: what each call needs.
        peers: the memory of the ranks of this rank's block, if they read each other's.
    """

    def __init__(self, member: Membership, kernels: Kernels, pool: EventPool, mover: Mover | None) -> None:
        self._member = member
        if mover is not None and member.options.cuda_transport == "peer":
            raise UsageError(
                f"group {member.name}: cuda_transport=peer, but cuda_path=reference moves bytes by stock NCCL"
            )
        self.peers = None if mover is not None else connect_peers(member, kernels)
        staging_bytes = None if self.peers is None else self.peers.staging_bytes
        self.calls = PreparedCalls(
            member.rank, member.world_size, member.options, member.block_size, kernels, staging_bytes,
            0 if self.peers is None else self.peers.most_blocks,
        )  # fmt: skip
        reaches_all = member.world_size == 1 or (self.peers is not None and len(self.peers.ranks) == member.world_size)
        self.nccl: NcclCommunicator | None = None
        if not reaches_all and mover is None:
            self.nccl = NcclCommunicator(
                member.store("nccl"), member.rank, member.world_size, kernels.make_current, member.failure,
                member.timeout_s,
            )  # fmt: skip
        context, make_current = kernels.context or 0, kernels.make_current
        if mover is None:
            library = None if self.nccl is None else nccl()
            self.native = NativeCall(driver(), library, pool, context, make_current)
        else:
            self.native = ReferenceCall(driver(), pool, context, make_current, kernels.launch, mover)

    def issue(
        self,
        call: Prepared,
        streams: Streams,
        buffers: tuple[int, int, int],
        order: Order,
        done: int,
        capture: int = 0,
    ) -> None:
        """Issue a call's program.

        Args:
            call: has one.
            buffers: the addresses of input, output and scratch.
            done: an event to record behind it, or 0.
            capture: the number of the graph's capture, as ``capture`` has it.

        Raises:
            NativeError: a function failed.
        """
        program: Any = call.program
        peers = 0
        if self.peers is not None:
            seat = self.peers.seat(call.staging_bytes, capture)
            if capture or not call.is_fused:
                in_place = self.peers.leave_in_place(seat, call, buffers[0], buffers[1])
                program = self.calls.variant(call, in_place, bool(capture))
            buffers, peers = (buffers[0], buffers[1], seat.scratch), seat.address
        comm = 0 if self.nccl is None else self.nccl.handle or 0
        if not self.native.issue(program, comm, streams, buffers, order, done, peers):
            raise NativeError(failure_text(program, self.native.failure, _describe))

    def capture(self, streams: Streams) -> int:
        """Which capture of a graph a call is part of whose memory is the capture's; 0 where each call has its own."""
        if self.peers is None:
            return 0
        return capture_id(streams.main if streams.caller is None else streams.caller)

    def check(self) -> None:
        """Ask for an error that was met in the background.

        Raises:
            TransportError: there is one.
        """
        if self.nccl is not None:
            self.nccl.check()
        if self.peers is not None:
            self.peers.check()

    def abort(self) -> None:
        """End what runs on the GPU, without the peers. From any thread."""
        if self.peers is not None:
            self.peers.abort()
        if self.nccl is not None:
            self.nccl.abort()

    def close(self) -> None:
        """Release everything; the GPU is done with it."""
        if self.nccl is not None:
            self.nccl.close()
        if self.peers is not None:
            self.peers.close()
        self.calls.clear()


def _describe(function: str, code: int) -> str:
    return (nccl() if function.startswith("nccl") else driver()).describe(code)
