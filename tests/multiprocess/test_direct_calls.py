# SPDX-License-Identifier: Apache-2.0
"""The short way of synchronous calls: the long way's bits beside ranks that take that one, and its refusals."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import detcomm
from tests import inputs, oracle
from tests.launch import Ranks
from tests.torch_tensors import bits, group, tensor

DTYPE, COUNT, CALLS = "bfloat16", 60, 4


@pytest.fixture(scope="module", params=[3, 5])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as standing:
        yield standing


def _num_direct(pg: Any) -> int:
    return int(pg._group.direct.num_completed)


def _both_ways(rank: int, world_size: int) -> tuple[list[str], int, int]:
    """Odd ranks issue the same calls asynchronously, which takes the long way; what is wrong, and the calls counted."""
    wrong = []
    asynchronous = rank % 2 == 1
    with group() as pg:
        dist.all_reduce(torch.ones(1))  # connects
        before = _num_direct(pg)
        for seed in range(CALLS):
            given = inputs.make(DTYPE, COUNT, world_size, seed)
            expected = inputs.bits(oracle.reduce(given, DTYPE, "sum")).tobytes()
            own = COUNT // world_size * torch.empty(0, dtype=torch.bfloat16).element_size()
            whole, part = tensor(given[rank], DTYPE), torch.empty(COUNT // world_size, dtype=torch.bfloat16)
            _finish(dist.reduce_scatter_tensor(part, whole, async_op=asynchronous))
            if bits(part) != expected[rank * own : (rank + 1) * own]:
                wrong.append(f"reduce_scatter {seed}")
            gathered = torch.empty(COUNT, dtype=torch.bfloat16)
            _finish(dist.all_gather_into_tensor(gathered, part, async_op=asynchronous))
            if bits(gathered) != expected:
                wrong.append(f"all_gather {seed}")
            _finish(dist.all_reduce(whole, async_op=asynchronous))
            if bits(whole) != expected:
                wrong.append(f"all_reduce {seed}")
        return wrong, _num_direct(pg) - before, pg._get_sequence_number_for_group()


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()


def test_ranks_that_take_the_long_way_meet_those_that_do_not(ranks: Ranks) -> None:
    calls = 3 * CALLS
    expected = [([], 0 if rank % 2 else calls, calls + 1) for rank in range(ranks.world_size)]
    assert ranks.run(_both_ways) == expected


def _alike(rank: int, world_size: int) -> tuple[list[str], int]:
    """Calls of one length that differ in type or operation alone, each twice; what is wrong, and the direct calls."""
    wrong = []
    with group() as pg:
        dist.all_reduce(torch.ones(1))
        before = _num_direct(pg)
        for turn in range(2):
            for dtype in ("float32", "int32", "bfloat16", "float16"):
                given = inputs.make(dtype, COUNT, world_size, turn)
                for op in ("sum", "max", "min"):
                    expected = inputs.bits(oracle.reduce(given, dtype, op)).tobytes()
                    own = len(expected) // world_size
                    whole, torch_op = tensor(given[rank], dtype), getattr(dist.ReduceOp, op.upper())
                    part = torch.empty(COUNT // world_size, dtype=whole.dtype)
                    dist.reduce_scatter_tensor(part, whole, op=torch_op)
                    if bits(part) != expected[rank * own : (rank + 1) * own]:
                        wrong.append(f"reduce_scatter of {dtype}, {op}, turn {turn}")
                    dist.all_reduce(whole, op=torch_op)
                    if bits(whole) != expected:
                        wrong.append(f"all_reduce of {dtype}, {op}, turn {turn}")
        return wrong, _num_direct(pg) - before


def test_calls_that_are_alike_but_for_type_or_operation_are_kept_apart(ranks: Ranks) -> None:
    assert ranks.run(_alike) == [([], 2 * 4 * 3 * 2)] * ranks.world_size


def _overlaps(rank: int, world_size: int) -> tuple[list[bool], int]:
    """Shards of the larger tensor in place, and two that lie askew; whether each is right, and the direct calls."""
    with group() as pg:
        dist.all_reduce(torch.ones(1))
        before = _num_direct(pg)
        right = []
        for shift in (0, 1):
            room = torch.full((4 * world_size + 1,), float(rank + 1))
            whole, part = room[: 4 * world_size], room[4 * rank + shift : 4 * rank + shift + 4]
            dist.all_gather_into_tensor(whole, part)
            right.append(whole.tolist() == [float(peer + 1) for peer in range(world_size) for _ in range(4)])
            room = torch.full((4 * world_size + 1,), float(rank + 1))
            whole, part = room[: 4 * world_size], room[4 * rank + shift : 4 * rank + shift + 4]
            dist.reduce_scatter_tensor(part, whole)
            right.append(part.tolist() == [world_size * (world_size + 1) / 2] * 4)
        return right, _num_direct(pg) - before


def test_memory_that_lies_askew_takes_the_long_way(ranks: Ranks) -> None:
    assert ranks.run(_overlaps) == [([True] * 4, 2)] * ranks.world_size


def _mismatch(rank: int, world_size: int) -> tuple[str, list[float], int]:
    """Known calls of two sizes, of which rank 0 makes another than the rest."""
    with group() as pg:
        for count in (1, 2, 1, 2):
            dist.all_reduce(torch.ones(count))
        before = _num_direct(pg)
        mine = torch.ones(1 if rank == 0 else 2)
        with pytest.raises(detcomm.MismatchError) as caught:
            dist.all_reduce(mine)
        num_direct = _num_direct(pg) - before
        assert mine.tolist() == [1.0] * mine.numel()
        again = torch.ones(3)
        dist.all_reduce(again)
        return str(caught.value), again.tolist(), num_direct


def test_a_mismatch_has_one_text_and_the_group_goes_on(ranks: Ranks) -> None:
    results = ranks.run(_mismatch)
    (text,) = {text for text, _, _ in results}
    assert all(fragment in text for fragment in ("collective #5", "float32[1]", "float32[2]"))
    assert [rest for _, *rest in results] == [[[float(ranks.world_size)] * 3, 1]] * ranks.world_size


def _after_the_end(rank: int, world_size: int) -> str:
    with group() as pg:
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
        pg.shutdown()
        with pytest.raises(detcomm.UsageError) as caught:
            dist.all_reduce(torch.ones(1))
        return str(caught.value)


def test_a_group_that_was_shut_down_refuses_known_calls(ranks: Ranks) -> None:
    assert all("has been destroyed" in text for text in ranks.run(_after_the_end))
