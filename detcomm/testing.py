# SPDX-License-Identifier: Apache-2.0
"""Conformance checks for who brings a transport, a device or a fold of his own. Public, and free of any test framework.

    detcomm.testing.check_golden()                    # planner, executor and folds of this machine against known bits
    detcomm.testing.check_golden(my_reduce)           # the same vectors against an implementation of one's own
    detcomm.testing.check_transport(make)             # on every rank: does this transport keep the seam's contract?

A check returns when all is well and raises ``AssertionError`` with what, where, expected and got otherwise.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import groupby

import numpy as np

from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.communicator import Communicator
from detcomm.errors import PeerTimeoutError, TransportError
from detcomm.fold import FoldSpec, fold
from detcomm.golden_vectors import GoldenCase, cases
from detcomm.options import Options
from detcomm.transports import loopback
from detcomm.transports.base import Bytes, Parcel, Transport

Reduce = Callable[[GoldenCase], Sequence[Bytes]]
"""Does the all-reduce of a case and returns its result on each rank, or on those that it has."""

MakeTransport = Callable[[], Transport]
"""This rank's end of a fresh transport; every rank calls it equally often."""

PATIENCE_S = 60.0
"""How long a healthy exchange may take, on a machine that has much else to do."""


def check_golden(reduce: Reduce | None = None, *, numerics_id: str | None = None) -> int:
    """Compare reductions with the golden vectors that ship with detcomm.

    Args:
        reduce: what to check; by default planner, executor and folds, over a loopback transport.
        numerics_id: the vectors of this id alone, ``tree/1:float32``; by default those of every id.

    Returns:
        The number of cases, all of which agreed.

    Raises:
        AssertionError: with id, type, operation, world size, and expected and got bits of the first element.
    """
    num_cases = 0
    for _, group in groupby(cases(numerics_id), key=lambda case: (case.numerics_id, case.world_size)):
        batch = list(group)
        outcomes = map(reduce, batch) if reduce is not None else _reduce_over_loopback(batch)
        for case, results in zip(batch, outcomes, strict=True):
            for rank, result in enumerate(results):
                _check_bits(case, rank, result)
        num_cases += len(batch)
    return num_cases


def check_transport(make: MakeTransport) -> None:
    """Check the contract of ``Transport``. Every rank of the group (at least two) calls this at the same time.

    Checks that messages arrive whole, in posting order and by any pattern; that memory is free again after an exchange;
    that large messages in both directions do not block each other; that a late peer, an abort and a closed
    transport end in the error that the seam names; and that reductions over it have the promised bits.

    Args:
        make: called several times on each rank; gives this rank's end of a fresh transport.

    Raises:
        AssertionError: the transport breaks its contract.
    """
    for check in (_check_messages, _check_large_messages, _check_memory_is_free, _check_reductions):
        with closing(make()) as transport:
            assert transport.world_size >= 2, "a transport needs at least two ranks to show anything"
            check(transport)
    _check_close(make())
    for break_exchange in (_check_late_peer, _check_abort):
        with closing(make()) as transport, closing(make()) as meeting_point:
            break_exchange(transport)
            _meet(meeting_point)  # nobody closes before the others have seen their error


def _reduce_over_loopback(batch: Sequence[GoldenCase]) -> Iterator[list[Bytes]]:
    first = batch[0]
    options = Options(
        association=first.association.name,
        ring_chunk_elems=first.association.ring_chunk_elems,
        accumulate=first.accumulate,
    )

    def body(transport: Transport) -> list[Bytes]:
        with closing(Communicator(transport, options, 1, "golden")) as communicator:
            return [_all_reduce(communicator, case) for case in batch]

    by_rank = loopback.run(first.world_size, body)
    return ([results[index] for results in by_rank] for index in range(len(batch)))


def _all_reduce(communicator: Communicator, case: GoldenCase) -> Bytes:
    dtype = case.dtype.real
    input = case.inputs[communicator.rank]
    output = np.zeros_like(case.expected)
    communicator.run(
        Call(Collective.ALL_REDUCE, dtype, output.size // dtype.itemsize, case.op),
        input,
        output,
        factor=case.factors[communicator.rank] if case.factors else None,
        label=case.dtype.value,
        timeout_s=PATIENCE_S,
    )
    return output


def _check_bits(case: GoldenCase, rank: int, result: Bytes) -> None:
    if np.array_equal(result, case.expected):
        return
    if result.size != case.expected.size:
        raise AssertionError(f"{case}: expected {case.expected.size} bytes, got {result.size}")
    itemsize = case.dtype.itemsize
    index = int(np.flatnonzero(result != case.expected)[0]) // itemsize
    element = slice(index * itemsize, (index + 1) * itemsize)
    operands = ", ".join(_hex(data[element]) for data in case.inputs)
    raise AssertionError(
        f"{case}, element {index} on rank {rank}: expected {_hex(case.expected[element])}, "
        f"got {_hex(result[element])}; contributions {operands}"
    )


def _hex(element: Bytes) -> str:
    return "0x" + element[::-1].tobytes().hex()  # little-endian memory, most significant digit first


def _message(src: int, dst: int, index: int, num_bytes: int) -> Bytes:
    """Bytes that no other message has."""
    return np.random.PCG64([src, dst, index]).random_raw(num_bytes // 8 + 1).view(np.uint8)[:num_bytes]


def _others(transport: Transport) -> list[int]:
    return [rank for rank in range(transport.world_size) if rank != transport.rank]


def _meet(transport: Transport) -> None:
    nothing = np.empty(0, np.uint8)
    token = np.zeros(1, np.uint8)
    parcels = [Parcel(peer, data) for peer in _others(transport) for data in (token, nothing)]
    rooms = [Parcel(parcel.peer, parcel.data.copy()) for parcel in parcels]
    transport.exchange(parcels, rooms, PATIENCE_S)


def _check_messages(transport: Transport) -> None:
    """All to all, then rings in both directions with idle ranks; sizes from nothing to some pages, several a pair."""
    me, world_size = transport.rank, transport.world_size
    sizes = (0, 1, 7, 4096, 3, 0, 70001)
    ring = [((me + 1) % world_size, (me - 1) % world_size), ((me - 1) % world_size, (me + 1) % world_size)]
    patterns = [(_others(transport), _others(transport))] + [([dst], [src]) for dst, src in ring]
    patterns.append(([1] if me == 0 else [], [0] if me == 1 else []))
    for destinations, sources in patterns:
        sends = [Parcel(dst, _message(me, dst, i, size)) for dst in destinations for i, size in enumerate(sizes)]
        recvs = [Parcel(src, np.empty(size, np.uint8)) for src in sources for size in sizes]
        transport.exchange(sends, recvs, PATIENCE_S)
        for position, parcel in enumerate(recvs):
            index = position % len(sizes)
            expected = _message(parcel.peer, me, index, sizes[index])
            assert np.array_equal(parcel.data, expected), (
                f"{transport.name}: message {index} of {sizes[index]} bytes from rank {parcel.peer} to rank {me} "
                f"is not what was sent, or out of order"
            )


def _check_large_messages(transport: Transport) -> None:
    """More than any buffer on the way holds, both ways at once: a blocking send would wait for ever."""
    num_bytes = (8 << 20) + 5
    sends = [Parcel(peer, _message(transport.rank, peer, 0, num_bytes)) for peer in _others(transport)[:2]]
    senders = [rank for rank in _others(transport) if transport.rank in _first_two(rank, transport.world_size)]
    recvs = [Parcel(peer, np.empty(num_bytes, np.uint8)) for peer in senders]
    transport.exchange(sends, recvs, PATIENCE_S)
    for parcel in recvs:
        expected = _message(parcel.peer, transport.rank, 0, num_bytes)
        assert np.array_equal(parcel.data, expected), f"{transport.name}: a large message from {parcel.peer} changed"


def _first_two(rank: int, world_size: int) -> list[int]:
    return [peer for peer in range(world_size) if peer != rank][:2]


def _check_memory_is_free(transport: Transport) -> None:
    """What is sent may be overwritten as soon as the exchange is over."""
    me, peers = transport.rank, _others(transport)
    buffer = np.empty(10000, np.uint8)
    rooms = [np.empty_like(buffer) for _ in peers]
    for turn in range(50):
        buffer[:] = (turn + me) % 256
        transport.exchange(
            [Parcel(peer, buffer) for peer in peers],
            [Parcel(peer, room) for peer, room in zip(peers, rooms, strict=True)],
            PATIENCE_S,
        )
        buffer[:] = 255
        for peer, room in zip(peers, rooms, strict=True):
            assert (room == (turn + peer) % 256).all(), (
                f"{transport.name}: rank {peer}'s message {turn} was overwritten"
            )


def _check_reductions(transport: Transport) -> None:
    """Bits of all-reduce by every kind of schedule, with ranks that come late, against one fold of all the leaves."""
    world_size, count = transport.world_size, 1009
    leaves = []
    for rank in range(world_size):
        words = np.random.PCG64(rank).random_raw(count)
        exponents = np.uint64(100) + (words >> np.uint64(40)) % np.uint64(50)
        leaves.append(((exponents << np.uint64(23)) | (words & np.uint64(0x807FFFFF))).astype(np.uint32).view(np.uint8))
    expected = np.empty_like(leaves[0])
    spec = FoldSpec(ReduceOp.SUM, DType.FLOAT32, "float32", "tree", (True,) * world_size, True, world_size)
    fold(spec, leaves, expected)
    call = Call(Collective.ALL_REDUCE, DType.FLOAT32, count, ReduceOp.SUM)
    for schedule in ("auto", "oneshot", "direct", "halving", "binomial"):
        communicator = Communicator(transport, Options(schedule=schedule), 1, "check_transport")
        for turn in range(10):
            time.sleep(0.001 * ((transport.rank * 7 + turn * 3) % 5))
            output = np.zeros_like(expected)
            communicator.run(call, leaves[transport.rank], output, timeout_s=PATIENCE_S)
            assert np.array_equal(output, expected), f"{transport.name}: wrong bits by {schedule}, repetition {turn}"


def _check_close(transport: Transport) -> None:
    transport.close()
    transport.close()
    with _raises(TransportError, f"{transport.name}: an exchange after close"):
        _meet(transport)


def _check_late_peer(transport: Transport) -> None:
    """Rank 0 waits for a message that nobody sends."""
    if transport.rank:
        return
    started = time.monotonic()
    with _raises(PeerTimeoutError, f"{transport.name}: a peer that never sends"):
        transport.exchange([], [Parcel(1, np.empty(8, np.uint8))], 0.3)
    assert time.monotonic() - started >= 0.25, f"{transport.name}: gave up long before the timeout"


def _check_abort(transport: Transport) -> None:
    """Rank 0 waits for ever, and another of its threads ends that."""
    if transport.rank:
        return
    timer = threading.Timer(0.3, transport.abort, ("the check said so",))
    timer.start()
    with _raises(TransportError, f"{transport.name}: abort during an exchange") as seen:
        transport.exchange([], [Parcel(1, np.empty(8, np.uint8))], PATIENCE_S)
    timer.join()
    assert "the check said so" in str(seen[0]), f"{transport.name}: abort's reason is not in {seen[0]}"


@contextmanager
def _raises(expected: type[Exception], what: str) -> Iterator[list[Exception]]:
    seen: list[Exception] = []
    try:
        yield seen
    except expected as error:
        seen.append(error)
    else:
        raise AssertionError(f"{what} must raise {expected.__name__}")
