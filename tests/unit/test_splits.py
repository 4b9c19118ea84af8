# SPDX-License-Identifier: Apache-2.0
"""The sum that tells whether all splits of an all-to-all fit, and the words for those that do not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from detcomm.agreement import DIRECT_WORLD_SIZE
from detcomm.communicator import Communicator
from detcomm.errors import MismatchError
from detcomm.movement_call import ALL_TO_ALL, MovementCall
from detcomm.splits import Splits, agree_on_splits, checksum, describe
from tests.unit.communicator_ranks import PATIENCE_S, check_group_works, run_ranks

CALL = MovementCall(ALL_TO_ALL, "float32")

_sizes = st.integers(0, 2**40)


def _left(sent: np.ndarray, received: np.ndarray) -> int:
    """The sum of all ranks' checksums; ``received[i, j]`` is what rank j expects of rank i."""
    num_ranks = len(sent)
    parts = [checksum(Splits(sent[rank].tolist(), received[:, rank].tolist()), rank) for rank in range(num_ranks)]
    return sum(parts) % 2**64


@st.composite
def _matrices(draw: st.DrawFn) -> np.ndarray:
    num_ranks = draw(st.integers(2, 9))
    return np.array(draw(st.lists(_sizes, min_size=num_ranks**2, max_size=num_ranks**2))).reshape(num_ranks, -1)


@given(_matrices())
def test_nothing_is_left_of_splits_that_fit(sent: np.ndarray) -> None:
    assert _left(sent, sent) == 0


@given(_matrices(), st.data())
def test_a_size_that_differs_leaves_something(sent: np.ndarray, data: st.DataObject) -> None:
    received = sent.copy()
    for _ in range(data.draw(st.integers(1, 3))):
        pair = data.draw(st.tuples(*[st.integers(0, len(sent) - 1)] * 2))
        received[pair] = data.draw(_sizes)
    assert (_left(sent, received) == 0) == bool((sent == received).all())


@pytest.mark.parametrize("num_ranks", [3, 4, 5, 7, 8])
def test_sizes_swapped_between_two_pairs_are_seen(num_ranks: int) -> None:
    """Rows and columns add up as before: a plain sum would not see it."""
    sent = np.full((num_ranks, num_ranks), 5)
    received = sent.copy()
    received[:2, :2] += [[1, -1], [-1, 1]]
    assert (sent.sum(axis=0) == received.sum(axis=0)).all()
    assert (sent.sum(axis=1) == received.sum(axis=1)).all()
    assert _left(sent, received) != 0


@pytest.mark.parametrize("world_size", [3, 4, 5, DIRECT_WORLD_SIZE + 1])
def test_every_rank_names_the_first_pair(world_size: int) -> None:
    def body(communicator: Communicator) -> str:
        rank = communicator.rank
        sent, received = (
            [8 * rank + peer for peer in range(world_size)],
            [8 * peer + rank for peer in range(world_size)],
        )
        agree_on_splits(communicator, CALL, Splits(sent, received), PATIENCE_S)
        if rank == 2:
            received[1] += 4
        with pytest.raises(MismatchError) as caught:
            agree_on_splits(communicator, CALL, Splits(sent, received), PATIENCE_S)
        check_group_works(communicator)
        return str(caught.value)

    (text,) = set(run_ranks(world_size, body))
    assert text.startswith("group test: the ranks disagree on the sizes of an all_to_all: ")
    assert text.endswith(": rank 1 sends 10 bytes to rank 2, which expects 14")


def test_further_pairs_are_counted() -> None:
    table = np.zeros((3, 2, 3), dtype=np.int64)
    table[0, 0] = [1, 2, 3]
    assert "rank 0 sends 1 bytes to rank 0, which expects 0; and 2 more pairs differ" in describe(table)
