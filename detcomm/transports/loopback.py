# SPDX-License-Identifier: Apache-2.0
"""All ranks in one process, one thread each: the transport of unit tests and of a world of one rank.

Messages are copied into a queue when sent and handed out in posting order, like bytes in a socket: what was sent
before a rank closed or aborted still arrives. Knows nothing of collectives.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from detcomm.errors import PeerTimeoutError, TransportError
from detcomm.transports.base import Bytes, Parcel, Transport

Result = TypeVar("Result")

Delay = Callable[[int, int], None]
"""Called with (rank, number of its exchange) before each exchange: tests shake the timing with it."""


class LoopbackHub:
    """The queues between the ranks of one group, and one ``LoopbackTransport`` for each rank."""

    def __init__(self, world_size: int, delay: Delay | None = None) -> None:
        self._changed = threading.Condition()
        self._queues: dict[tuple[int, int], deque[Bytes]] = {
            (src, dst): deque() for src in range(world_size) for dst in range(world_size) if src != dst
        }
        self._gone: dict[int, str] = {}
        self.delay = delay
        self.transports = [LoopbackTransport(self, rank, world_size) for rank in range(world_size)]

    def post(self, src: int, dst: int, data: Bytes) -> None:
        with self._changed:
            self._queues[src, dst].append(data.copy())
            self._changed.notify_all()

    def take(self, src: int, dst: int, deadline: float) -> Bytes | None:
        """The next message from ``src``, or ``None`` at the deadline.

        Raises:
            TransportError: if either end has closed or aborted, and nothing is left to receive.
        """
        queue = self._queues[src, dst]
        with self._changed:
            while not queue or dst in self._gone:
                if dst in self._gone:
                    raise TransportError(self._gone[dst])
                if src in self._gone:
                    raise TransportError(f"rank {src} is lost: {self._gone[src]}")
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)
            return queue.popleft()

    def leave(self, rank: int, reason: str) -> None:
        """Mark a rank as gone, for the first reason given, and wake everybody who waits for it."""
        with self._changed:
            self._gone.setdefault(rank, reason)
            self._changed.notify_all()

    def check(self, rank: int) -> None:
        """Raise if this rank has left."""
        with self._changed:
            if rank in self._gone:
                raise TransportError(self._gone[rank])


class LoopbackTransport(Transport):
    """One rank's end of a ``LoopbackHub``."""

    name = "loopback"

    def __init__(self, hub: LoopbackHub, rank: int, world_size: int) -> None:
        self._hub = hub
        self._num_exchanges = 0
        self.rank = rank
        self.world_size = world_size

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        if self._hub.delay is not None:
            self._hub.delay(self.rank, self._num_exchanges)
        self._num_exchanges += 1
        self._hub.check(self.rank)
        for parcel in sends:
            self._hub.post(self.rank, parcel.peer, parcel.data)
        for index, parcel in enumerate(recvs):
            data = self._hub.take(parcel.peer, self.rank, deadline)
            if data is None:
                waiting = sorted({late.peer for late in recvs[index:]})
                raise PeerTimeoutError(f"rank {self.rank} waited {timeout_s:g} s for ranks {waiting}")
            if data.size != parcel.data.size:
                raise TransportError(
                    f"rank {parcel.peer} sent {data.size} bytes where rank {self.rank} expected {parcel.data.size}"
                )
            np.copyto(parcel.data, data)

    def close(self) -> None:
        self._hub.leave(self.rank, f"rank {self.rank} closed its transport")

    def abort(self, reason: str) -> None:
        self._hub.leave(self.rank, reason)


def run(world_size: int, fn: Callable[[LoopbackTransport], Result], *, delay: Delay | None = None) -> list[Result]:
    """Call ``fn(transport)`` for each rank on a thread of its own; the results in rank order.

    A rank that raises leaves the group, so the others do not wait for it. The error that came first is raised
    here, when all threads have ended; ``fn`` bounds its own waits by the timeout of its exchanges.
    """
    hub = LoopbackHub(world_size, delay)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def body(transport: LoopbackTransport) -> None:
        try:
            results[transport.rank] = fn(transport)
        except BaseException as error:  # also pytest's own, which are no Exception
            errors.append(error)
            transport.abort(f"{type(error).__name__}: {error}")
        finally:
            transport.close()

    threads = [
        threading.Thread(target=body, args=(transport,), name=f"loopback-rank-{transport.rank}", daemon=True)
        for transport in hub.transports
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]
