# SPDX-License-Identifier: Apache-2.0
"""How a group comes to its peer memory, or all its ranks to the same reason why it has none.

A block that cannot map its memory refuses for all blocks of the group: then every rank has the same view of who sends
by what. A way to share memory is tried, proved by reading, and if any rank finds fault with it the next one is tried.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs

from detcomm.cuda.peer_memory.device_access import DeviceAccess
from detcomm.cuda.peer_memory.host_words import HostWords
from detcomm.cuda.peer_memory.ipc import IpcShare
from detcomm.cuda.peer_memory.meeting import Meeting
from detcomm.cuda.peer_memory.memory import PeerMemory
from detcomm.cuda.peer_memory.regions import Regions
from detcomm.cuda.peer_memory.retirement import reclaim, retire
from detcomm.cuda.peer_memory.sharing import Enter, Provider, SharedPiece, share_piece
from detcomm.cuda.peer_memory.symmetric import SymmetricShare
from detcomm.errors import DetcommError

PROVIDERS = ("CUDA IPC", "symmetric memory")
"""In the order in which they are tried; ``symmetric`` says why it is the second."""


@attrs.frozen
class Refusal:
    """There is no peer memory. The reason is the same text on all ranks of the group."""

    reason: str


def blocks_of(world_size: int, block_size: int) -> list[range]:
    """The group ranks of each aligned block."""
    return [range(start, min(start + block_size, world_size)) for start in range(0, world_size, block_size)]


def connect_peer_memory(
    store: Any,
    name: str,
    rank: int,
    world_size: int,
    block_size: int,
    device: int,
    make_current: Callable[[], None],
    staging_bytes: int,
    failure: Callable[[], BaseException | None],
    timeout_s: float,
    providers: Sequence[str] = PROVIDERS,
) -> PeerMemory | Refusal:
    """Share device memory in each block of a group; all ranks of the group call this, and all get memory or none.

    Args:
        store: a key space of this group's peer memory alone.
        name: of the group, for messages.
        block_size: ranks of one aligned block that share a host.
        device: its number in this process.
        make_current: makes the device's context this thread's.
        staging_bytes: of each rank's staging area, equal on all ranks.
        failure: the group's first error, once there is one; ends every wait.
        timeout_s: for all of it.
        providers: ways to share memory, in the order in which they are tried; equal on all ranks.

    Raises:
        PeerTimeoutError: ranks did not come; names them.
        TransportError: the group has failed meanwhile.
    """
    blocks = blocks_of(world_size, block_size)
    if len(blocks) == world_size:
        return Refusal(f"no two of the {world_size} ranks are neighbours on one host (blocks of {block_size})")
    reclaim()
    deadline = time.monotonic() + timeout_s
    meeting = Meeting(store, name, blocks, rank, failure)
    access: DeviceAccess | None = None
    words: HostWords | None = None
    error = ""
    try:
        access = DeviceAccess(make_current)
        words = HostWords(access)
    except DetcommError as failed:
        error = str(failed)
    reasons = [meeting.verdict("device", meeting.agree("device", error, deadline), deadline)]
    if not reasons[0]:
        assert access is not None
        assert words is not None
        reasons.clear()
        for provider in providers:
            provide = _provide(provider, access, device)
            regions: list[Regions] = []
            enter = partial(_first_regions, regions, access, len(meeting.ranks))
            piece = _share_in_all_blocks(provide, access, meeting, staging_bytes, enter, deadline)
            if isinstance(piece, SharedPiece):
                return PeerMemory(meeting, access, device, provide, provider, words, regions[0], piece)
            reasons.append(f"{provider}: {piece}")
    if words is not None:
        words.close()
    if access is not None:
        access.close()
    return Refusal("; ".join(reasons))


def _provide(name: str, access: DeviceAccess, device: int) -> Provider:
    if name == "symmetric memory":
        return lambda num_bytes: SymmetricShare(device, num_bytes)
    return lambda num_bytes: IpcShare(access, num_bytes)


def _first_regions(
    made: list[Regions], access: DeviceAccess, num_ranks: int, staging: tuple[int, ...], table: int
) -> None:
    made.append(Regions(access, table, num_ranks))
    made[0].map_region(0, staging)


def _share_in_all_blocks(
    provide: Provider, access: DeviceAccess, meeting: Meeting, staging_bytes: int, enter: Enter, deadline: float
) -> SharedPiece | str:
    """This block's memory if all blocks have theirs; else the reason of the first that has not."""
    piece = share_piece(provide, access, meeting, staging_bytes, enter, deadline)
    own_reason = piece if isinstance(piece, str) else ""
    reason = meeting.verdict("shared", own_reason, deadline)
    if isinstance(piece, str) or not reason:
        return reason or piece
    piece.share.unmap()
    retire(meeting, piece.share.free)
    return reason
