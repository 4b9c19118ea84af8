# SPDX-License-Identifier: Apache-2.0
"""What ``test_mpi_transport.py`` runs under mpirun: many cases in one launch, since a launch takes seconds.

``python -m tests.multiprocess.mpi_cases FOLDER`` writes ``FOLDER/rank<r>.json``: for each case ``null`` or a traceback.
A case that fails on one rank may leave the others waiting; they end at their own deadlines.
"""

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from detcomm import testing
from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.communicator import Communicator
from detcomm.errors import MismatchError, PeerTimeoutError, TransportError
from detcomm.options import Options
from detcomm.transports import mpi
from detcomm.transports.base import Parcel
from detcomm.transports.mpi import MpiTransport, create_communicator
from tests import inputs, oracle

PATIENCE_S = 120.0
WORLD_SIZE = MPI.COMM_WORLD.Get_size()
RANK = MPI.COMM_WORLD.Get_rank()

_tags: Iterator[int] = count(1)


def _transport() -> MpiTransport:
    return MpiTransport(create_communicator(range(WORLD_SIZE), next(_tags)))


def _peers() -> list[int]:
    return [peer for peer in range(WORLD_SIZE) if peer != RANK]


def _pattern(src: int, dst: int, number: int, size: int) -> np.ndarray:
    return ((np.arange(size) * 7 + src * 31 + dst * 57 + number * 101) % 251).astype(np.uint8)


def case_messages_match_in_posting_order() -> None:
    sizes = [4, 0, 300_001, 1, 65537]
    with closing(_transport()) as transport:
        for _ in range(2):
            sends = [
                Parcel(peer, _pattern(RANK, peer, number, size))
                for number, size in enumerate(sizes)
                for peer in _peers()
            ]
            rooms = [Parcel(peer, np.zeros(size, dtype=np.uint8)) for peer in reversed(_peers()) for size in sizes]
            transport.exchange(sends, rooms, PATIENCE_S)
            expected = [
                _pattern(peer, RANK, number, size) for peer in reversed(_peers()) for number, size in enumerate(sizes)
            ]
            for room, want in zip(rooms, expected, strict=True):
                np.testing.assert_array_equal(room.data, want)


def case_long_messages_travel_in_pieces() -> None:
    before, mpi._PIECE_BYTES = mpi._PIECE_BYTES, 1000
    try:
        case_messages_match_in_posting_order()
    finally:
        mpi._PIECE_BYTES = before


def case_ranks_of_a_subgroup_are_the_groups() -> None:
    order = list(reversed(range(0, WORLD_SIZE, 2)))
    tag = next(_tags)
    if RANK not in order:
        return
    with closing(MpiTransport(create_communicator(order, tag))) as transport:
        assert transport.rank == order.index(RANK)
        assert transport.world_size == len(order)


def case_a_silent_peer_is_named_at_the_timeout() -> None:
    with closing(_transport()) as transport:
        if RANK == 1:
            time.sleep(1.0)
            return
        rooms = [Parcel(peer, np.zeros(8, dtype=np.uint8)) for peer in _peers()]
        sends = [Parcel(peer, np.zeros(8, dtype=np.uint8)) for peer in _peers()]
        with pytest.raises(PeerTimeoutError, match=r"waited 0.5 s for ranks \[.*1.*\]"):
            transport.exchange(sends, rooms, 0.5)
        transport.abort("late")
        with pytest.raises(TransportError, match="late"):
            transport.exchange([], [], 0.5)


def case_abort_wakes_a_blocked_exchange() -> None:
    with closing(_transport()) as transport:
        threading.Timer(0.2, transport.abort, ("a peer is on fire",)).start()
        with pytest.raises(TransportError, match="a peer is on fire"):
            transport.exchange([], [Parcel(_peers()[0], np.zeros(8, dtype=np.uint8))], PATIENCE_S)


def case_the_contract_of_transports_is_kept() -> None:
    testing.check_transport(_transport)


def case_reductions_have_the_promised_bits() -> None:
    with closing(Communicator(_transport(), Options(), 1, "mpi")) as communicator:
        for dtype, size in (("float32", 1), ("bfloat16", 1000), ("float64", 40000)):
            contributions = inputs.make(dtype, size, WORLD_SIZE, seed=3)
            output = np.zeros_like(inputs.bits(contributions[RANK]))
            call = Call(Collective.ALL_REDUCE, DType(dtype), size, ReduceOp.AVG)
            communicator.run(call, inputs.bits(contributions[RANK]), output, timeout_s=PATIENCE_S)
            np.testing.assert_array_equal(output, inputs.bits(oracle.reduce(contributions, dtype, "avg")))


def case_a_mismatch_is_everybodys_error_and_the_group_goes_on() -> None:
    with closing(Communicator(_transport(), Options(), 1, "mpi")) as communicator:
        call = Call(Collective.ALL_REDUCE, DType.FLOAT32, 4 + (RANK == 2), ReduceOp.SUM)
        data = np.full(4 * call.count, 0xA5, dtype=np.uint8)
        with pytest.raises(MismatchError, match=r"rank 2: all_reduce\(sum, float32\[5\]\)"):
            communicator.run(call, data, data, timeout_s=PATIENCE_S)
        assert (data == 0xA5).all()
    case_reductions_have_the_promised_bits()


def main(folder: Path) -> None:
    results: dict[str, str | None] = {}
    cases: list[Callable[[], None]] = [case for name, case in globals().items() if name.startswith("case_")]
    for case in cases:
        try:
            case()
            results[case.__name__] = None
        except BaseException:
            results[case.__name__] = traceback.format_exc()
            break  # the tags of the ranks may have parted
    (folder / f"rank{RANK}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
