# SPDX-License-Identifier: Apache-2.0
"""Steps over MPI's nonblocking messages, on a communicator of detcomm's own.

Completion is polled, since MPI has no wait with an end: yielding the core at first, then sleeping longer and longer,
so that ranks that outnumber the cores still get to run. MPI itself decides what happens when a process dies; most
launchers end the whole job.
"""

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from detcomm.errors import PeerTimeoutError, TransportError
from detcomm.transports.base import Bytes, Parcel, Transport

_TAG = 1
_PIECE_BYTES = 1 << 30
"""Messages are cut to pieces that every MPI can count in an ``int``."""

_YIELD_S = 200e-6
_YIELD_BYTES_PER_S = 0.5e9
"""How long to poll without sleeping: a round of latency, and the time of the bytes on a slow medium."""

_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3


class MpiTransport(Transport):
    """Moves the bytes of a step with ``Isend`` and ``Irecv``.

    Args:
        comm: a communicator used by nothing else, whose ranks are the group's. Freed by ``close``.
    """

    name = "mpi"

    def __init__(self, comm: Any) -> None:
        self.rank = comm.Get_rank()
        self.world_size = comm.Get_size()
        self._comm = comm
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._failure: str | None = None
        self._abandoned: list[Any] = []
        self._closing = threading.Lock()

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], timeout_s: float) -> None:
        if self._failure is not None:
            raise TransportError(self._failure)
        deadline = time.monotonic() + timeout_s
        requests: list[Any] = []
        peers: list[int] = []
        try:
            for parcels, post in ((recvs, self._comm.Irecv), (sends, self._comm.Isend)):
                for parcel in parcels:
                    for piece in _pieces(parcel.data):
                        requests.append(post([piece, MPI.BYTE], parcel.peer, _TAG))
                        peers.append(parcel.peer)
            num_bytes = sum(parcel.data.size for parcel in (*sends, *recvs))
            self._finish(requests, peers, num_bytes, deadline, timeout_s)
        except MPI.Exception as error:
            self._abandon(requests, sends, recvs)
            raise TransportError(f"rank {self.rank} lost one of ranks {sorted(set(peers))}: {error}") from error
        except BaseException:
            self._abandon(requests, sends, recvs)
            raise

    def close(self) -> None:
        with self._closing:
            if self._failure is None:
                self._failure = "the MPI transport is closed"
                # After a failure the communicator is left to MPI_Finalize: messages may still be on their way.
                if not MPI.Is_finalized():
                    self._comm.Free()

    def abort(self, reason: str) -> None:
        with self._closing:
            self._failure = self._failure or reason

    def _finish(
        self, requests: list[Any], peers: Sequence[int], num_bytes: int, deadline: float, timeout_s: float
    ) -> None:
        yield_until = time.monotonic() + _YIELD_S + num_bytes / _YIELD_BYTES_PER_S
        pause_s = _FIRST_PAUSE_S
        while not MPI.Request.Testall(requests):
            if self._failure is not None:
                raise TransportError(self._failure)
            now = time.monotonic()
            if now >= deadline:
                late = sorted({peer for peer, one in zip(peers, requests, strict=True) if not one.Test()})
                raise PeerTimeoutError(f"rank {self.rank} waited {timeout_s:g} s for ranks {late}")
            if now < yield_until:
                os.sched_yield()
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _abandon(self, requests: Sequence[Any], sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> None:
        """Cancel what can be cancelled, and keep the memory that MPI may still read or write."""
        for request in requests[: sum(-(-parcel.data.size // _PIECE_BYTES) for parcel in recvs)]:
            with contextlib.suppress(MPI.Exception):
                request.Cancel()
        self._abandoned += [requests, sends, recvs]


def _pieces(data: Bytes) -> list[Bytes]:
    return [data[start : start + _PIECE_BYTES] for start in range(0, data.size, _PIECE_BYTES)]


def create_communicator(world_ranks: Sequence[int], tag: int) -> Any:
    """A new communicator over these ranks of ``MPI.COMM_WORLD``, in this order.

    Called by exactly these ranks, all of them, at about the same time: MPI gives the call no timeout.

    Args:
        tag: keeps apart groups that are created at the same time; any whole number.
    """
    world = MPI.COMM_WORLD
    group = world.Get_group().Incl(list(world_ranks))
    try:
        return world.Create_group(group, tag % 32768)  # MPI promises tags up to 32767
    finally:
        group.Free()
