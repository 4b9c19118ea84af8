# SPDX-License-Identifier: Apache-2.0
"""Whether what the ranks of an all-to-all send is what their peers expect, known to all ranks after one small sum.

A rank knows a row of the matrix of messages (what it sends) and a column (what it receives). It multiplies the size of
each message by the weight of its pair, adds what it sends and subtracts what it receives. Summed over the ranks, modulo
2^64, nothing is left if all sizes match. The weights are odd, so a single size that differs always leaves something;
several would have to cancel, which is a matter of one in 2^64. Knows sizes; neither tensors nor how they are moved.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from detcomm.call import Call, even_shards
from detcomm.collectives import Collective, DType
from detcomm.communicator import Communicator
from detcomm.errors import MismatchError
from detcomm.movement_call import MovementCall


class Splits(NamedTuple):
    """Bytes that a rank sends to each rank, and receives from each."""

    sent: Sequence[int]
    received: Sequence[int]


def agree_on_splits(communicator: Communicator, movement: MovementCall, splits: Splits, timeout_s: float) -> None:
    """Return if all ranks are about to do this all-to-all, and their splits fit each other; all ranks call this.

    Raises:
        MismatchError: on every rank, with one text that names the calls, or the first pair whose sizes differ.
        TransportError: a peer is lost or late.
    """
    if communicator.agree(movement, checksum(splits, communicator.rank), timeout_s=timeout_s) == 0:
        return
    num_ranks = communicator.world_size
    own = np.array([splits.sent, splits.received], dtype=np.int64).reshape(-1).view(np.uint8)
    room = np.empty(own.size * num_ranks, dtype=np.uint8)
    gather = Call(Collective.ALL_GATHER, DType.UINT8, room.size, shard_counts=even_shards(room.size, num_ranks))
    communicator.run(gather, own, room, timeout_s=timeout_s)
    raise MismatchError(f"group {communicator.name}: {describe(room.view(np.int64).reshape(num_ranks, 2, num_ranks))}")


def checksum(splits: Splits, rank: int) -> int:
    """What is left of this rank's row and column, modulo 2^64; all ranks' sum is zero if they match."""
    row, column = _weights(rank, len(splits.sent))
    sent = np.array(splits.sent, dtype=np.uint64)
    received = np.array(splits.received, dtype=np.uint64)
    left: NDArray[np.uint64] = (row * sent).sum(keepdims=True) - (column * received).sum(keepdims=True)
    return int(left[0])


def describe(table: NDArray[np.int64]) -> str:
    """The first pair that differs. ``table[r]`` holds what rank r sends to each rank, and receives from each."""
    sent, received = table[:, 0, :], table[:, 1, :].T
    src, dst = np.argwhere(sent != received)[0].tolist()
    more = int((sent != received).sum()) - 1
    return (
        f"the ranks disagree on the sizes of an all_to_all: rank {src} sends {sent[src, dst]} bytes to rank {dst}, "
        f"which expects {received[src, dst]}" + (f"; and {more} more pairs differ" if more else "")
    )


@lru_cache(maxsize=64)
def _weights(rank: int, num_ranks: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The weights of the messages from this rank, and of those to it: odd, and with no pattern."""
    others = np.arange(num_ranks, dtype=np.uint64)
    own, size = np.uint64(rank), np.uint64(num_ranks)
    return _mix(own * size + others), _mix(others * size + own)


def _mix(number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), with the last bit set."""
    mixed = (number + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
