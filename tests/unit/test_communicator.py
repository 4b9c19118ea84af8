# SPDX-License-Identifier: Apache-2.0
"""The communicator over loopback: the promised bits of every collective, agreement, and what happens after an error."""

import threading
import time
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest

from detcomm.call import Call, even_shards
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.communicator import Communicator, Request
from detcomm.errors import MismatchError, PeerTimeoutError, ScheduleError, TransportError, UsageError
from detcomm.options import Options
from detcomm.transports import loopback
from detcomm.transports.base import Bytes, Transport
from detcomm.transports.loopback import LoopbackTransport
from tests import inputs, oracle

PATIENCE_S = 60.0
COUNT = 331  # prime: shards and chunks are ragged


def run_ranks(
    world_size: int, body: Callable[[Communicator], object], options: Options | None = None, **more: object
) -> list[object]:
    def on_rank(transport: LoopbackTransport) -> object:
        with closing(Communicator(transport, options or Options(), 2, "test")) as communicator:
            return body(communicator)

    return loopback.run(world_size, on_rank, **more)


def all_reduce(count: int = COUNT, op: ReduceOp = ReduceOp.SUM, dtype: DType = DType.FLOAT32) -> Call:
    return Call(Collective.ALL_REDUCE, dtype, count, op)


def untouched(num_bytes: int) -> Bytes:
    return np.full(num_bytes, 0xA5, dtype=np.uint8)


SCHEDULES = [
    ("tree", "auto"),
    ("tree", "oneshot"),
    ("tree", "direct"),
    ("tree", "halving"),
    ("tree", "hierarchical"),
    ("tree", "binomial"),
    ("linear", "direct"),
    ("ring", "ring"),
    ("ring", "auto"),
]


@pytest.mark.parametrize(("association", "schedule"), SCHEDULES)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, 8])
def test_all_reduce_has_the_promised_bits(world_size: int, in_place: bool, association: str, schedule: str) -> None:
    contributions = inputs.make("bfloat16", COUNT, world_size, seed=world_size)
    options = Options(association=association, schedule=schedule, ring_chunk_elems=5, chunk_bytes=128)
    expected = oracle.reduce(contributions, "bfloat16", "avg", association=association, ring_chunk_elems=5)

    def body(communicator: Communicator) -> Bytes:
        for _ in range(2):  # the second time the plan comes from the cache
            own = inputs.bits(contributions[communicator.rank]).copy()
            output = own if in_place else untouched(own.size)
            call = all_reduce(op=ReduceOp.AVG, dtype=DType.BFLOAT16)
            communicator.run(call, own, output, timeout_s=PATIENCE_S)
        return output

    for output in run_ranks(world_size, body, options):
        np.testing.assert_array_equal(output, inputs.bits(expected))


def test_another_association_gives_other_bits() -> None:
    contributions = inputs.make("float32", COUNT, 5, seed=5)

    def result(association: str) -> bytes:
        def body(communicator: Communicator) -> bytes:
            own = inputs.bits(contributions[communicator.rank]).copy()
            communicator.run(all_reduce(), own, own, timeout_s=PATIENCE_S)
            return own.tobytes()

        (bits,) = set(run_ranks(5, body, Options(association=association, ring_chunk_elems=5)))
        return bits

    assert len({result(association) for association in ("tree", "linear", "ring")}) == 3


def test_timing_does_not_reach_the_bits() -> None:
    contributions = inputs.make("float32", COUNT, 5, seed=6)
    results = set()
    for seed in range(4):
        dice = np.random.default_rng(seed)
        pauses = dice.random((5, 64)) * 0.002

        def body(communicator: Communicator) -> bytes:
            own = inputs.bits(contributions[communicator.rank]).copy()
            communicator.run(all_reduce(), own, own, timeout_s=PATIENCE_S)
            return own.tobytes()

        options = Options(schedule="halving", chunk_bytes=64)
        results |= set(
            run_ranks(5, body, options, delay=lambda rank, number, p=pauses: time.sleep(p[rank][number % 64]))
        )
    assert len(results) == 1


# Where output may lie in the memory of the input: apart, at the own shard, at the start, one element further.
@pytest.mark.parametrize("layout", ["apart", "own shard", "start", "shifted"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_reduce_scatter_into_any_part_of_its_input(world_size: int, layout: str) -> None:
    shard_counts = tuple(3 * rank % 7 + 5 for rank in range(world_size))
    count = sum(shard_counts)
    contributions = inputs.make("float32", count, world_size, seed=7)
    call = Call(Collective.REDUCE_SCATTER, DType.FLOAT32, count, ReduceOp.SUM, shard_counts=shard_counts)
    expected = inputs.bits(oracle.reduce(contributions, "float32", "sum"))

    def body(communicator: Communicator) -> Bytes:
        rank = communicator.rank
        size, begin = 4 * shard_counts[rank], 4 * call.shard_starts[rank]
        room = np.zeros(4 * count + 64, dtype=np.uint8)
        own = room[: 4 * count]
        own[:] = inputs.bits(contributions[rank])
        start = {"apart": 4 * count, "own shard": begin, "start": 0, "shifted": begin + 4}[layout]
        output = room[start : start + size]
        communicator.run(call, own, output, timeout_s=PATIENCE_S)
        return output

    for rank, output in enumerate(run_ranks(world_size, body)):
        begin = 4 * call.shard_starts[rank]
        np.testing.assert_array_equal(output, expected[begin : begin + 4 * shard_counts[rank]])


@pytest.mark.parametrize("layout", ["apart", "own shard", "start", "shifted"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_all_gather_from_any_part_of_its_output(world_size: int, layout: str) -> None:
    shard_counts = tuple(5 * rank % 4 + 3 for rank in range(world_size))  # bytes
    count = sum(shard_counts)
    call = Call(Collective.ALL_GATHER, DType.UINT8, count, shard_counts=shard_counts)
    whole = np.arange(1, count + 1, dtype=np.uint8)

    def body(communicator: Communicator) -> Bytes:
        rank = communicator.rank
        begin, size = call.shard_starts[rank], shard_counts[rank]
        room = np.zeros(count + 64, dtype=np.uint8)
        start = {"apart": count, "own shard": begin, "start": 0, "shifted": begin + 1}[layout]
        own = room[start : start + size]
        own[:] = whole[begin : begin + size]
        communicator.run(call, own, room[:count], timeout_s=PATIENCE_S)
        return room[:count]

    for output in run_ranks(world_size, body):
        np.testing.assert_array_equal(output, whole)


@pytest.mark.parametrize("world_size", [3, 4, 5])
def test_reduce_writes_on_the_root_alone(world_size: int) -> None:
    contributions = inputs.make("float16", COUNT, world_size, seed=8)
    expected = inputs.bits(oracle.reduce(contributions, "float16", "sum"))
    for root in range(world_size):
        call = Call(Collective.REDUCE, DType.FLOAT16, COUNT, ReduceOp.SUM, root=root)

        def body(communicator: Communicator, call: Call = call) -> Bytes:
            own = inputs.bits(contributions[communicator.rank]).copy()
            before = own.copy()
            if communicator.rank == call.root:
                communicator.run(call, own, own, timeout_s=PATIENCE_S)
                return own
            communicator.run(call, own, own[:0], timeout_s=PATIENCE_S)
            np.testing.assert_array_equal(own, before)
            return own

        np.testing.assert_array_equal(run_ranks(world_size, body)[root], expected)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_premul_sum_takes_a_factor_from_each_rank(world_size: int, in_place: bool) -> None:
    factors = inputs.factors(world_size)
    contributions = inputs.make("bfloat16", COUNT, world_size, seed=9)
    expected = inputs.bits(oracle.reduce(contributions, "bfloat16", "premul_sum", factors=factors))

    def body(communicator: Communicator) -> Bytes:
        own = inputs.bits(contributions[communicator.rank]).copy()
        before = own.copy()
        output = own if in_place else untouched(own.size)
        call = all_reduce(op=ReduceOp.PREMUL_SUM, dtype=DType.BFLOAT16)
        communicator.run(call, own, output, factor=factors[communicator.rank], timeout_s=PATIENCE_S)
        assert in_place or np.array_equal(own, before), "the input belongs to the caller"
        return output

    for output in run_ranks(world_size, body):
        np.testing.assert_array_equal(output, expected)


def test_a_world_of_one_keeps_every_bit() -> None:
    nans = np.array([0x7F800001, 0xFFC12345, 0x80000000, 1], dtype=np.uint32).view(np.uint8)

    def body(communicator: Communicator) -> Bytes:
        output = untouched(16)
        communicator.run(all_reduce(4, ReduceOp.AVG), nans, output, timeout_s=PATIENCE_S)
        return output

    np.testing.assert_array_equal(run_ranks(1, body)[0], nans)


# -- agreement --------------------------------------------------------------------------------------------------------

SHARDED = Call(Collective.REDUCE_SCATTER, DType.FLOAT32, 60, ReduceOp.SUM, shard_counts=even_shards(60, 3))

DIFFERENCES: list[tuple[Call, Call, str]] = [
    (all_reduce(7), all_reduce(8), "count"),
    (all_reduce(7), all_reduce(0), "count"),
    (all_reduce(7), all_reduce(7, dtype=DType.INT32), "dtype"),
    (all_reduce(7), all_reduce(7, ReduceOp.MAX), "operation"),
    (all_reduce(7), Call(Collective.REDUCE, DType.FLOAT32, 7, ReduceOp.SUM), "collective"),
    (
        Call(Collective.REDUCE, DType.FLOAT32, 7, ReduceOp.SUM, root=0),
        Call(Collective.REDUCE, DType.FLOAT32, 7, ReduceOp.SUM, root=1),
        "root",
    ),
]


def _run_differing(communicator: Communicator, call: Call, label: str = "") -> tuple[str, bool]:
    """Run what will not be agreed on; the error, and whether the output kept its bits."""
    size = call.dtype.itemsize
    data = np.zeros(call.input_count(communicator.rank) * size, dtype=np.uint8)
    output = untouched(call.output_count(communicator.rank) * size)
    with pytest.raises(MismatchError) as caught:
        communicator.run(call, data, output, label=label, timeout_s=PATIENCE_S)
    return str(caught.value), bool((output == 0xA5).all())


def _check_group_still_works(communicator: Communicator) -> None:
    contributions = inputs.make("float32", COUNT, communicator.world_size, seed=10)
    own = inputs.bits(contributions[communicator.rank]).copy()
    communicator.run(all_reduce(), own, own, timeout_s=PATIENCE_S)
    np.testing.assert_array_equal(own, inputs.bits(oracle.reduce(contributions, "float32", "sum")))


@pytest.mark.parametrize(("usual", "odd", "field"), DIFFERENCES)
@pytest.mark.parametrize("world_size", [3, 4, 5])
def test_a_mismatch_is_the_same_error_on_every_rank(world_size: int, usual: Call, odd: Call, field: str) -> None:
    for odd_rank in range(world_size):

        def body(communicator: Communicator, odd_rank: int = odd_rank) -> str:
            text, kept = _run_differing(communicator, odd if communicator.rank == odd_rank else usual)
            assert kept, "nothing may be written before the ranks agree"
            _check_group_still_works(communicator)
            return text

        (text,) = set(run_ranks(world_size, body))
        assert text.startswith("collective #1 of group test: the ranks disagree on ")
        assert field in text.partition(": ")[2].partition(": ")[0]
        assert f"rank {odd_rank}: {odd.text()}" in text
        assert usual.text() in text


@pytest.mark.parametrize("world_size", [3, 4, 5])
def test_shards_labels_and_options_are_agreed_on_too(world_size: int) -> None:
    def shards(communicator: Communicator) -> str:
        counts = [4] * world_size
        if communicator.rank == 1:
            counts[:2] = [3, 5]
        call = Call(Collective.REDUCE_SCATTER, DType.FLOAT32, 4 * world_size, ReduceOp.SUM, shard_counts=tuple(counts))
        return _run_differing(communicator, call)[0]

    def labels(communicator: Communicator) -> str:
        return _run_differing(communicator, all_reduce(8), "complex64" if communicator.rank == 1 else "")[0]

    def options(transport: LoopbackTransport) -> str:
        own = Options(chunk_bytes=128 if transport.rank == 1 else 256)
        return _run_differing(Communicator(transport, own, 1, "test"), all_reduce(8))[0]

    def associations(transport: LoopbackTransport) -> str:
        own = Options(association="linear" if transport.rank == 1 else "tree")
        return _run_differing(Communicator(transport, own, 1, "test"), all_reduce(8))[0]

    for texts, field in (
        (run_ranks(world_size, shards), "shards"),
        (run_ranks(world_size, labels), "dtype"),
        (loopback.run(world_size, options), "options"),
        (loopback.run(world_size, associations), "numerics"),
    ):
        (text,) = set(texts)
        assert f"disagree on {field}" in text
        assert "rank 1: " in text


def test_a_different_number_of_earlier_calls_is_said() -> None:
    def body(communicator: Communicator) -> str:
        if communicator.rank == 1:
            communicator.sequence += 1  # as if it had done one more, alone
        return _run_differing(communicator, all_reduce(8))[0]

    (text,) = set(run_ranks(3, body))
    assert "disagree on sequence number" in text


def test_equal_calls_with_other_memory_agree() -> None:
    def body(communicator: Communicator) -> None:
        own = np.zeros(4 * COUNT + 3, dtype=np.uint8)[communicator.rank :][: 4 * COUNT]  # any alignment
        communicator.run(all_reduce(), own, own, timeout_s=PATIENCE_S)

    run_ranks(3, body)


# -- several calls under one agreement ---------------------------------------------------------------------------------


def _requests(communicator: Communicator, calls: list[Call]) -> list[Request]:
    requests = []
    for seed, call in enumerate(calls):
        contributions = inputs.make(call.dtype.value, call.count, communicator.world_size, seed=seed)
        own = inputs.bits(contributions[communicator.rank]).copy()
        requests.append(Request(call, own, untouched(own.size)))
    return requests


BLOCK = [
    all_reduce(40),
    all_reduce(0),
    all_reduce(3, ReduceOp.MAX, DType.INT64),
    all_reduce(COUNT, ReduceOp.AVG, DType.BFLOAT16),
]


@pytest.mark.parametrize("world_size", [1, 3, 4, 5])
def test_coalesced_calls_have_the_bits_of_single_ones(world_size: int) -> None:
    def body(communicator: Communicator) -> list[Bytes]:
        requests = _requests(communicator, BLOCK)
        communicator.run_many(requests, timeout_s=PATIENCE_S)
        assert communicator.sequence == 1
        return [request.output for request in requests]

    for outputs in run_ranks(world_size, body):
        for seed, (call, output) in enumerate(zip(BLOCK, outputs, strict=True)):
            contributions = inputs.make(call.dtype.value, call.count, world_size, seed=seed)
            expected = oracle.reduce(contributions, call.dtype.value, call.op.value)
            np.testing.assert_array_equal(output, inputs.bits(expected))


CHANGED = [
    ("call 3", [*BLOCK[:2], all_reduce(4, ReduceOp.MAX, DType.INT64), BLOCK[3]], "all_reduce(max, int64[4])"),
    ("call 1", [all_reduce(41), *BLOCK[1:]], "all_reduce(sum, float32[41])"),
    ("call 4", BLOCK[:3], "no further call"),
    ("call 5", [*BLOCK, all_reduce(1)], "all_reduce(sum, float32[1])"),
    ("call 2", BLOCK[:1], "no further call"),
]


@pytest.mark.parametrize(("where", "changed", "said"), CHANGED)
@pytest.mark.parametrize("world_size", [3, 4, 5])
def test_the_first_call_that_differs_is_named(world_size: int, where: str, changed: list[Call], said: str) -> None:
    for odd_rank in (0, world_size - 1):

        def body(communicator: Communicator, odd_rank: int = odd_rank) -> str:
            requests = _requests(communicator, changed if communicator.rank == odd_rank else BLOCK)
            with pytest.raises(MismatchError) as caught:
                communicator.run_many(requests, timeout_s=PATIENCE_S)
            assert all((request.output == 0xA5).all() for request in requests)
            _check_group_still_works(communicator)
            return str(caught.value)

        (text,) = set(run_ranks(world_size, body))
        assert f"disagree on {where} of a coalesced block" in text
        assert f"rank {odd_rank}: {said}" in text


# -- refusals and failures ---------------------------------------------------------------------------------------------


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
        _check_group_still_works(communicator)

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

    def agree(self, text: str, timeout_s: float) -> None:
        self.asked.append(f"agree {text}")

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
