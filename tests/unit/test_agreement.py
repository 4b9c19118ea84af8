# SPDX-License-Identifier: Apache-2.0
"""What ranks disagree on is the same error on all of them, before anything is written, and the group goes on."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from detcomm.agreement import DIRECT_WORLD_SIZE, Agreement
from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.communicator import Communicator
from detcomm.errors import MismatchError
from detcomm.header import HEADER_BYTES
from detcomm.options import Options
from detcomm.request import Request
from detcomm.transports import loopback
from detcomm.transports.base import Bytes, Parcel
from detcomm.transports.loopback import LoopbackTransport
from tests import inputs, oracle
from tests.unit.communicator_ranks import COUNT, PATIENCE_S, all_reduce, check_group_works, run_ranks, untouched

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


@pytest.mark.parametrize(("usual", "odd", "field"), DIFFERENCES)
@pytest.mark.parametrize("world_size", [3, 4, 5])
def test_a_mismatch_is_the_same_error_on_every_rank(world_size: int, usual: Call, odd: Call, field: str) -> None:
    for odd_rank in range(world_size):

        def body(communicator: Communicator, odd_rank: int = odd_rank) -> str:
            text, kept = _run_differing(communicator, odd if communicator.rank == odd_rank else usual)
            assert kept, "nothing may be written before the ranks agree"
            check_group_works(communicator)
            return text

        (text,) = set(run_ranks(world_size, body))
        assert text.startswith("collective #1 of group test: the ranks disagree on ")
        assert field in text.partition(": ")[2].partition(": ")[0]
        assert f"rank {odd_rank}: {odd.text()}" in text
        assert usual.text() in text


@pytest.mark.parametrize("world_size", [DIRECT_WORLD_SIZE + 1, 23, 32])
def test_a_large_group_comes_to_one_verdict_in_rounds(world_size: int) -> None:
    def body(transport: LoopbackTransport) -> str:
        communicator = Communicator(transport, Options(schedule="binomial"), 1, "test")
        check_group_works(communicator)
        odd = transport.rank == world_size // 2
        text, kept = _run_differing(communicator, all_reduce(8 if odd else 7))
        assert kept, "nothing may be written before the ranks agree"
        check_group_works(communicator)
        return text

    (text,) = set(loopback.run(world_size, body))
    assert f"rank {world_size // 2}: all_reduce(sum, float32[8])" in text
    assert "all_reduce(sum, float32[7])" in text


@pytest.mark.parametrize("world_size", [DIRECT_WORLD_SIZE + 1, 32])
def test_the_rounds_of_a_large_group_send_few_messages(world_size: int) -> None:
    def body(transport: LoopbackTransport) -> int:
        sent: list[int] = []
        exchange = transport.exchange

        def count_and_exchange(sends: Sequence[Parcel], recvs: Sequence[Parcel], timeout_s: float) -> None:
            sent.append(len(sends))
            exchange(sends, recvs, timeout_s)

        transport.exchange = count_and_exchange  # type: ignore[method-assign]
        Agreement(transport, "test").agree(1, bytes(HEADER_BYTES), [], PATIENCE_S)
        return sum(sent)

    assert loopback.run(world_size, body) == [math.ceil(math.log2(world_size))] * world_size


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
            check_group_works(communicator)
            return str(caught.value)

        (text,) = set(run_ranks(world_size, body))
        assert f"disagree on {where} of a coalesced block" in text
        assert f"rank {odd_rank}: {said}" in text
