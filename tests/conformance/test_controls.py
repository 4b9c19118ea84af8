# SPDX-License-Identifier: Apache-2.0
"""The suite must be able to fail: a group that keeps another contract than the one promised is caught."""

from dataclasses import replace

import numpy as np
import pytest

from detcomm.collectives import Collective
from detcomm.communicator import Communicator
from detcomm.transports import loopback
from detcomm.transports.base import Transport
from tests import inputs, oracle
from tests.conformance import expected, run
from tests.conformance.cases import RING_CHUNK_ELEMS, Case, Way
from tests.conformance.covering import covering

COUNT = 1000


def _run_against(done: Way, promised: Way, case: Case, world_size: int) -> None:
    """Reduce in one way and judge by another."""

    def body(transport: Transport) -> None:
        communicator = Communicator(transport, done.options, done.block_size, "control")
        run.check(communicator, promised, [case], batch=1)

    loopback.run(world_size, body)


@pytest.mark.parametrize("world_size", [4, 5, 7, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "complex64"])
@pytest.mark.parametrize("collective", [Collective.ALL_REDUCE, Collective.REDUCE_SCATTER])
def test_another_association_is_caught(collective: Collective, dtype: str, world_size: int) -> None:
    ways = [Way(association, "float32", "auto") for association in ("tree", "linear", "ring")]
    case = Case(collective, dtype, "sum", COUNT)
    for done in ways:
        for promised in ways:
            if done == promised:
                _run_against(done, promised, case, world_size)
            else:
                with pytest.raises(AssertionError, match="is the first that differs"):
                    _run_against(done, promised, case, world_size)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("world_size", [3, 8])
def test_another_accumulation_is_caught(dtype: str, world_size: int) -> None:
    once, each = (Way("tree", accumulate, "direct") for accumulate in ("float32", "wire"))
    case = Case(Collective.ALL_REDUCE, dtype, "sum", COUNT)
    for done, promised in ((once, each), (each, once)):
        with pytest.raises(AssertionError, match="is the first that differs"):
            _run_against(done, promised, case, world_size)


@pytest.mark.parametrize("memory", ["result", "input", "guard"])
def test_a_wrong_byte_is_caught(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the result, in an input that must be kept, and beside the output."""
    lay_out = run.trial

    def damaged(case: Case, rank: int, world_size: int, result: run.Bytes) -> run.Trial:
        trial = lay_out(case, rank, world_size, result)
        if rank == 1:
            index, byte = {"result": (0, 8), "input": (1, 8), "guard": (0, 0)}[memory]
            after = list(trial.after)
            after[index] = after[index].copy()
            after[index][byte] ^= 1
            trial = replace(trial, after=tuple(after))
        return trial

    monkeypatch.setattr(run, "trial", damaged)
    with pytest.raises(AssertionError, match="rank 1 of 3: byte"):
        run.over_loopback(3, Way("tree", "float32", "auto"), [Case(Collective.ALL_REDUCE, "float32", "sum", 10)])


def test_results_of_long_messages_are_the_oracle_itself() -> None:
    """The expectation repeats one period; here it is compared with the oracle on the whole message."""
    count, world_size = 2 * inputs.PERIOD + 1234, 5
    leaves = inputs.make("bfloat16", count, world_size, expected.SEED)
    for association in ("tree", "linear", "ring"):
        whole = oracle.reduce(leaves, "bfloat16", "sum", association=association, ring_chunk_elems=RING_CHUNK_ELEMS)
        case = Case(Collective.ALL_REDUCE, "bfloat16", "sum", count)
        for result in expected.results(Way(association, "float32", "auto"), case, world_size):
            assert np.array_equal(result, inputs.bits(whole))


def test_a_covering_without_rules_is_complete_and_short() -> None:
    sizes = (2, 3, 4, 5)
    rows = covering(sizes)
    for one in range(4):
        for other in range(one + 1, 4):
            assert len({(row[one], row[other]) for row in rows}) == sizes[one] * sizes[other]
    assert 20 <= len(rows) <= 30


def test_a_covering_that_cannot_be_says_so() -> None:
    with pytest.raises(ValueError, match="no value of factor 2"):
        covering((1, 1, 1), lambda factor, value, other, other_value: other != 2)
