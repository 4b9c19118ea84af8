# SPDX-License-Identifier: Apache-2.0
"""The communicator over loopback: refusals, lost peers, and the choice of the native path."""

import threading
from contextlib import closing

import numpy as np
import pytest

from detcomm.call import Call, even_shards
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.communicator import Communicator
from detcomm.errors import PeerTimeoutError, ScheduleError, TransportError, UsageError
from detcomm.options import Options
from detcomm.request import Request
from detcomm.transports import loopback
from detcomm.transports.base import Bytes, Transport
from detcomm.transports.loopback import LoopbackTransport
from tests.unit.communicator_ranks import PATIENCE_S, all_reduce, check_group_works, run_ranks

SHARDED = Call(Collective.REDUCE_SCATTER, DType.FLOAT32, 60, ReduceOp.SUM, shard_counts=even_shards(60, 3))


def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    data = np.zeros(16, dtype=np.uint8)
    wrong: list[tuple[Call, Bytes, Bytes, float | None, str]] = [
        (all_reduce(4), data[:12], data, None, "expected an input of 16 bytes, got 12"),
        (all_reduce(4), data, data[:12], None, "expected an output of 16 bytes, got 12"),
        (all_reduce(4, ReduceOp.PREMUL_SUM), data, data, None, "expected a factor"),
        (all_reduce(4), data, data, 2.0, "expected no factor"),
        (SHARDED, np.zeros(240, dtype=np.uint8), np.zeros(80, dtype=np.uint8), None, "expected 2 shards, got 3"),
        (Call(Collective.REDUCE, DType.INT8, 16, ReduceOp.SUM, root=2), data, data[:0], None, "a root below 2"),
    ]

    def body(communicator: Communicator) -> None:
        if communicator.rank == 0:  # the other rank would wait if anything were sent
            for call, input, output, factor, text in wrong:
                with pytest.raises(UsageError, match=text):
                    communicator.run(call, input, output, factor=factor, timeout_s=PATIENCE_S)
            with pytest.raises(UsageError, match="at least one call"):
                communicator.run_many([], timeout_s=PATIENCE_S)
        check_group_works(communicator)

    run_ranks(2, body)


def test_a_schedule_that_does_not_fit_is_refused_and_the_group_goes_on() -> None:
    def body(communicator: Communicator) -> None:
        data = np.zeros(16, dtype=np.uint8)
        with pytest.raises((ScheduleError, UsageError), match=r"halving|staged"):
            communicator.run(all_reduce(4), data, data, timeout_s=PATIENCE_S)
        shards = Call(Collective.ALL_GATHER, DType.UINT8, 9, shard_counts=(3, 3, 3))
        communicator.run(shards, data[:3], data[3:12], timeout_s=PATIENCE_S)

    run_ranks(3, body, Options(association="linear", schedule="halving"))


def test_after_a_lost_peer_every_call_raises_at_once() -> None:
    def body(communicator: Communicator) -> str:
        data = np.zeros(16, dtype=np.uint8)
        if communicator.rank == 2:
            communicator.abort("rank 2 has had enough")
        with pytest.raises(TransportError) as first:
            communicator.run(all_reduce(4), data, data, timeout_s=PATIENCE_S)
        with pytest.raises(TransportError, match="group test is unusable since an earlier error"):
            communicator.run(all_reduce(4), data, data, timeout_s=PATIENCE_S)
        return str(first.value)

    texts = run_ranks(4, body)
    assert all("rank 2 has had enough" in text or "is lost" in text for text in texts)


def test_a_late_peer_is_named() -> None:
    late = threading.Event()

    def body(communicator: Communicator) -> str:
        data = np.zeros(16, dtype=np.uint8)
        if communicator.rank == 1:
            late.wait(PATIENCE_S)
            return ""
        try:
            communicator.run(all_reduce(4), data, data, timeout_s=0.2)
        except TransportError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            late.set()
        return "no error"

    texts = run_ranks(2, body)
    assert texts[0].startswith(PeerTimeoutError.__name__)
    assert "collective #1 of group test: agreement of the ranks: " in texts[0]
    assert "ranks [1]" in texts[0]


class _BrokenTransport(LoopbackTransport):
    """Fails in the exchange after the agreement with an error that no transport should raise."""

    num_exchanges = 0

    def exchange(self, sends, recvs, timeout_s):  # type: ignore[no-untyped-def]
        self.num_exchanges += 1
        if self.rank == 1 and self.num_exchanges == 2:
            raise MemoryError("no memory for a message")
        super().exchange(sends, recvs, timeout_s)


def test_any_error_in_the_midst_of_a_plan_reaches_the_peers() -> None:
    def body(transport: LoopbackTransport) -> str:
        transport.__class__ = _BrokenTransport
        data = np.zeros(16, dtype=np.uint8)
        with closing(Communicator(transport, Options(), 1, "test")) as communicator:
            expected = MemoryError if transport.rank == 1 else TransportError
            with pytest.raises(expected) as caught:
                communicator.run(all_reduce(4), data, data, timeout_s=PATIENCE_S)
        return str(caught.value)

    texts = loopback.run(3, body)
    assert any("rank 1 is lost: MemoryError: no memory for a message" in text for text in texts)


class _RecordingNative:
    """A native path that only records what it is asked to do."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def agree(self, text: str, timeout_s: float, remainder: int | None = None) -> int:
        self.asked.append(f"agree {text}")
        return 0

    def run(self, call, association, accumulate, input, output, *, factor=None, label="", timeout_s):  # type: ignore[no-untyped-def]
        self.asked.append(f"run {call.text()} {association.numerics_id(accumulate)}")


@pytest.mark.parametrize("schedule", ["auto", "oneshot"])
def test_the_native_path_is_taken_unless_a_schedule_is_asked_for(schedule: str) -> None:
    def body(transport: Transport) -> list[str]:
        native = transport.native_collectives = _RecordingNative()
        data = np.zeros(16, dtype=np.uint8)
        with closing(Communicator(transport, Options(schedule=schedule), 1, "test")) as communicator:
            communicator.run(all_reduce(4), data, data, timeout_s=PATIENCE_S)
            block = [Request(all_reduce(4), data, data), Request(all_reduce(2), data[:8], data[:8], label="complex64")]
            communicator.run_many(block, timeout_s=PATIENCE_S)
        return native.asked

    four, two = "all_reduce(sum, float32[4])", "all_reduce(sum, float32[2])"
    runs = [f"run {four} tree/1:float32", f"agree {four}\n{two} of complex64"]
    runs += [f"run {four} tree/1:float32", f"run {two} tree/1:float32"]
    assert loopback.run(2, body) == [runs if schedule == "auto" else []] * 2
