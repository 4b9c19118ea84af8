# SPDX-License-Identifier: Apache-2.0
"""How the ranks of one host come to see each other's shared memory: two rounds through the group's store.

First every rank makes its segment and tells where it is, or why it could not. Then every rank maps all others' and
tells whether that worked. All ranks read all answers, so either all of them have the transport or all raise one
error, and nothing is left open.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed import Store

from detcomm.errors import DetcommError, PeerTimeoutError, TransportError
from detcomm.header import ranks_text
from detcomm.store_access import read_all
from detcomm.transports.memory_segment import Address, Mapping, OwnSegment, available_bytes, open_peer
from detcomm.transports.shared_group import SharedGroup, segment_bytes, tuning_for
from detcomm.transports.shared_heap import process_heap
from detcomm.transports.shared_memory import SharedMemoryTransport

_SPARE_BYTES = 64 << 20
"""Memory to leave to everybody else."""


@dataclass(frozen=True)
class _Answer:
    """What a rank says in one round."""

    error: str = ""
    address: str = ""
    heap: str = ""
    cores: tuple[int, ...] = ()

    def encode(self) -> str:
        return json.dumps([self.error, self.address, self.heap, self.cores])

    @classmethod
    def decode(cls, text: str) -> "_Answer":
        error, address, heap, cores = json.loads(text)
        return cls(error, address, heap, tuple(cores))


def meet(
    store: Store,
    rank: int,
    world_size: int,
    *,
    chunk_bytes: int | None = None,
    timeout_s: float,
    give_up: Callable[[], bool] = lambda: False,
    names: Sequence[int] | None = None,
) -> SharedMemoryTransport:
    """Connect the ranks of a group, all of them on this host. Called by all; all return or all raise.

    Args:
        store: a key space of this attempt alone.
        chunk_bytes: the option, equal on all ranks.
        timeout_s: for both rounds.
        give_up: asked while this rank waits for the others; true ends the wait.
        names: by which errors call the ranks, if these are a part of a larger group.

    Raises:
        TransportError: shared memory does not work between these ranks; names those that said so and why.
        PeerTimeoutError: ranks did not answer; names them.
    """
    deadline = time.monotonic() + timeout_s
    names = range(world_size) if names is None else names

    def ask_all(name: str, answer: _Answer) -> list[_Answer]:
        return _round(store, name, rank, names, answer, max(deadline - time.monotonic(), 0.0), give_up)

    own: OwnSegment | None = None
    peers: dict[int, Mapping] = {}
    pidfds: dict[int, int] = {}
    heaps: dict[int, Mapping] = {}
    with contextlib.ExitStack() as on_failure:

        def release() -> None:
            if own is not None:
                own.close()
            for mapping in (*peers.values(), *heaps.values()):
                mapping.close()
            for pidfd in pidfds.values():
                os.close(pidfd)

        on_failure.callback(release)
        try:
            own = _make_segment(world_size, chunk_bytes)
            cores = tuple(sorted(os.sched_getaffinity(0)))
            answer = _Answer(address=own.address.encode(), heap=_own_heap(), cores=cores)
        except (DetcommError, OSError) as error:
            answer = _Answer(error=str(error))
        answers = ask_all("segment", answer)
        try:
            for peer in range(world_size):
                if peer != rank:
                    peers[peer], pidfds[peer] = open_peer(peer, Address.decode(answers[peer].address))
            if all(said.heap for said in answers):
                _open_heaps(rank, answers, heaps)
            answer = _Answer(heap="open" if heaps else "")
        except (DetcommError, OSError) as error:
            answer = _Answer(error=str(error))
        mapped = ask_all("mapped", answer)
        assert own is not None  # or a round has raised
        own.seal()
        num_cores = len({core for answer in answers for core in answer.cores})
        tuning = tuning_for(world_size, chunk_bytes, num_cores)
        own_heap = process_heap().segment.mapping if all(said.heap for said in mapped) else None
        group = SharedGroup(rank, world_size, own, peers, pidfds, own_heap, heaps, tuning, names)
        transport = SharedMemoryTransport(group)
        on_failure.pop_all()
        return transport


def _make_segment(world_size: int, chunk_bytes: int | None) -> OwnSegment:
    tuning = tuning_for(world_size, chunk_bytes, num_cores=1)
    num_bytes = segment_bytes(world_size, tuning)
    # Staging buffers of all ranks; mailboxes take memory only where a plan is run over them.
    needed = world_size * 4 * int(tuning.chunk_bytes) + _SPARE_BYTES
    available = available_bytes()
    if available is not None and available < needed:
        raise TransportError(
            f"shared memory needs {needed >> 20} MiB for {world_size} ranks, and this machine or control group has "
            f"{available >> 20} MiB left; a smaller chunk_bytes needs less"
        )
    return OwnSegment(num_bytes)


def _own_heap() -> str:
    """Where the shared allocations of this process are; empty if it can have none, which only costs speed."""
    try:
        return process_heap().segment.address.encode()
    except OSError:
        return ""


def _open_heaps(rank: int, answers: list[_Answer], heaps: dict[int, Mapping]) -> None:
    """Map the other ranks' shared allocations; none of them if one cannot be mapped."""
    try:
        for peer, said in enumerate(answers):
            if peer != rank:
                heaps[peer], pidfd = open_peer(peer, Address.decode(said.heap))
                os.close(pidfd)
    except (TransportError, OSError):
        for mapping in heaps.values():
            mapping.close()
        heaps.clear()


def _round(
    store: Store,
    name: str,
    rank: int,
    names: Sequence[int],
    answer: _Answer,
    timeout_s: float,
    give_up: Callable[[], bool],
) -> list[_Answer]:
    """Everybody's answers, if all are good."""
    keys = [f"shared_memory/{name}/{peer}" for peer in range(len(names))]
    store.set(keys[rank], answer.encode())
    texts = read_all(store, keys, timeout_s, give_up)
    missing = [names[peer] for peer, text in enumerate(texts) if text is None]
    if missing:
        raise PeerTimeoutError(
            f"shared memory: {ranks_text(missing)} did not answer within the timeout (round {name!r})"
        )
    answers = [_Answer.decode(text) for text in texts if text is not None]
    failures: dict[str, list[int]] = {}
    for peer, said in enumerate(answers):
        if said.error:
            failures.setdefault(said.error, []).append(names[peer])
    if failures:
        verdicts = "; ".join(f"{ranks_text(ranks)}: {error}" for error, ranks in failures.items())
        raise TransportError(f"shared memory does not work between these ranks: {verdicts}")
    return answers
