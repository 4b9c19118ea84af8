# SPDX-License-Identifier: Apache-2.0
"""Ranks that move different things all get one error, and go on; those that move the same keep one order."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import detcomm
from tests.launch import Ranks
from tests.torch_tensors import bits, group

ODD = 1
Case = tuple[Callable[[Any], Any], Callable[[Any], Any], str, str]
"""What the odd rank does, what the others do, and a fragment of the error for each of the two."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as standing:
        yield standing


class _Memory:
    """Six elements, and room for everybody's."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.own = torch.full((6,), float(rank + 1))
        self.room = torch.zeros(6 * world_size)
        self.parts = list(self.room.split(6))

    def to_each(self) -> list[torch.Tensor]:
        return [self.own.clone() for _ in range(self.world_size)]

    def gather(self, root: int, own: torch.Tensor | None = None) -> None:
        own = self.own if own is None else own
        dist.gather(own, [torch.zeros_like(own) for _ in self.parts] if self.rank == root else None, dst=root)

    def scatter(self, root: int) -> None:
        dist.scatter(self.room[:6], self.to_each() if self.rank == root else None, src=root)

    def uneven(self, sent: list[int], received: list[int]) -> None:
        dist.all_to_all_single(self.room[: sum(received)], self.own[: sum(sent)], received, sent)


CASES: dict[str, Case] = {
    "broadcast, all_reduce": (
        lambda m: dist.broadcast(m.own, 0),
        lambda m: dist.all_reduce(m.own),
        "broadcast(float32[6], root 0)",
        "all_reduce(sum, float32[6])",
    ),
    "broadcast, all_gather": (
        lambda m: dist.broadcast(m.own, 0),
        lambda m: dist.all_gather_into_tensor(m.room, m.own),
        "broadcast(float32[6], root 0)",
        "all_gather(",
    ),
    "broadcast, barrier": (
        lambda m: dist.broadcast(m.own, 2),
        lambda m: dist.barrier(),
        "broadcast(float32[6], root 2)",
        "barrier()",
    ),
    "broadcast: root": (
        lambda m: dist.broadcast(m.own, 1),
        lambda m: dist.broadcast(m.own, 0),
        "broadcast(float32[6], root 1)",
        "broadcast(float32[6], root 0)",
    ),
    "broadcast: size": (
        lambda m: dist.broadcast(m.own[:5], 0),
        lambda m: dist.broadcast(m.own, 0),
        "float32[5]",
        "float32[6]",
    ),
    "broadcast: type": (
        lambda m: dist.broadcast(m.own.view(torch.int32), 0),
        lambda m: dist.broadcast(m.own, 0),
        "int32[6]",
        "float32[6]",
    ),
    "asynchronous broadcast: size": (
        lambda m: dist.broadcast(m.own[:5], 0, async_op=True).wait(),
        lambda m: dist.broadcast(m.own, 0, async_op=True).wait(),
        "float32[5]",
        "float32[6]",
    ),
    "broadcast, reduce": (
        lambda m: dist.broadcast(m.own, 0),
        lambda m: dist.reduce(m.own, 0),
        "broadcast(float32[6], root 0)",
        "reduce(sum, float32[6], root 0)",
    ),
    "gather, scatter": (
        lambda m: m.gather(0),
        lambda m: m.scatter(0),
        "gather(float32[6], root 0)",
        "scatter(float32[6], root 0)",
    ),
    "gather: root": (lambda m: m.gather(1), lambda m: m.gather(0), "root 1", "root 0"),
    "gather: size": (lambda m: m.gather(0, m.own[:3]), lambda m: m.gather(0), "float32[3]", "float32[6]"),
    "scatter: root": (lambda m: m.scatter(1), lambda m: m.scatter(2), "root 1", "root 2"),
    "all_to_all, all_gather": (
        lambda m: dist.all_to_all_single(m.room[:6], m.own),
        lambda m: dist.all_gather_into_tensor(m.room, m.own),
        "all_to_all(float32)",
        "all_gather(",
    ),
    "all_to_all: type": (
        lambda m: dist.all_to_all_single(m.room[:6].view(torch.int32), m.own.view(torch.int32)),
        lambda m: dist.all_to_all_single(m.room[:6], m.own),
        "all_to_all(int32)",
        "all_to_all(float32)",
    ),
    "all_to_all: what is sent": (
        lambda m: m.uneven([1, 2, 3], [2, 2, 2]),
        lambda m: m.uneven([2, 2, 2], [2, 2, 2]),
        "rank 1 sends 4 bytes to rank 0, which expects 8; and 1 more pairs differ",
        "sizes of an all_to_all",
    ),
    "all_to_all: what is expected": (
        lambda m: dist.all_to_all(list(m.room[:7].split([2, 3, 2])), list(m.own.split(2))),
        lambda m: dist.all_to_all(list(m.room[:6].split(2)), list(m.own.split(2))),
        "rank 1 sends 8 bytes to rank 1, which expects 12",
        "sizes of an all_to_all",
    ),
    "objects, barrier": (
        lambda m: dist.broadcast_object_list(["x"], 1),
        lambda m: dist.barrier(),
        "broadcast(int64[1], root 1)",
        "barrier()",
    ),
}


def _mismatches(rank: int, world_size: int, transport: str) -> list[tuple[str, str]]:
    outcomes = []
    with group(detcomm.Options(transport=transport)):
        for odd, usual, _, _ in CASES.values():
            memory = _Memory(rank, world_size)
            before = bits(memory.own) + bits(memory.room)
            try:
                (odd if rank == ODD else usual)(memory)
                outcomes.append(("no error", ""))
            except RuntimeError as error:
                outcomes.append((type(error).__name__, str(error)))
            assert bits(memory.own) + bits(memory.room) == before, "something was moved"
            check = torch.ones(5)
            dist.all_reduce(check)
            dist.broadcast(check, 0)
            assert check.tolist() == [float(world_size)] * 5, (outcomes, check)
    return outcomes


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_ranks_that_disagree_all_raise_and_go_on(ranks: Ranks, transport: str) -> None:
    for outcomes, (name, case) in zip(zip(*ranks.run(_mismatches, transport), strict=True), CASES.items(), strict=True):
        assert {kind for kind, _ in outcomes} == {"MismatchError"}, (name, outcomes)
        (text,) = {text for _, text in outcomes}
        assert case[2] in text, name
        assert case[3] in text, name
        assert f"rank {ODD}" in text, name
        assert re.search(r"group \S+: the ranks disagree", text), name


def _wrong_on_one_rank(rank: int, world_size: int) -> list[str]:
    """The root refuses its own wrong lists and calls again: nothing was sent before."""
    texts = []
    with group() as pg:
        own, room = torch.full((4,), float(rank)), [torch.zeros(4) for _ in range(world_size)]
        if rank == 0:
            for wrong in (
                lambda: dist.gather(own, room[1:], dst=0),
                lambda: dist.gather(own, [*room[1:], torch.zeros(3)], dst=0),
                lambda: dist.scatter(own, room[1:], src=0),
                lambda: dist.scatter(own, [*room[1:], torch.zeros(3)], src=0),
                lambda: dist.all_to_all(room, room[1:]),
                lambda: dist.all_to_all_single(own, own, [1, 1, 1], [2, 1, 1]),
                lambda: pg.broadcast([own], world_size),
                lambda: pg.broadcast([own, own], 0),
            ):
                try:
                    wrong()
                    texts.append("not refused")
                except detcomm.UsageError as error:
                    texts.append(str(error))
        dist.gather(own, room if rank == 0 else None, dst=0)
        if rank == 0:
            texts.append(str([part[0].item() for part in room]))
    return texts


def test_what_is_wrong_on_one_rank_is_refused_before_anything_is_sent(ranks: Ranks) -> None:
    texts, *others = ranks.run(_wrong_on_one_rank)
    assert others == [[], []]
    fragments = ["expected 3 tensors, got 2", "float32[3]", "expected 3 tensors, got 2", "float32[3]"]
    fragments += ["3, 2", "3 splits of 4 rows", "expected a root below 3, got 3", "expected one tensor, got 2"]
    assert len(texts) == len(fragments) + 1
    assert all(fragment in text for fragment, text in zip(fragments, texts, strict=False)), texts
    assert texts[-1] == "[0.0, 1.0, 2.0]"


def _interleaved(rank: int, world_size: int) -> list[bool]:
    """Reductions and movements in flight together, synchronous ones in between, on a group and a part of it."""
    outcome = []
    with group():
        part = dist.new_group([0, 2])
        for turn in range(10):
            root = turn % world_size
            value, sums = torch.full((50,), float(rank * 100 + turn)), torch.full((70,), float(rank))
            rows = torch.full((world_size, 3), float(rank))
            got = torch.zeros_like(rows)
            works = [
                dist.broadcast(value, root, async_op=True),
                dist.all_reduce(sums, async_op=True),
                dist.all_to_all_single(got, rows, async_op=True),
            ]
            if turn % 2:
                dist.barrier()
            if rank != 1:
                works.append(dist.all_reduce(torch.ones(3), group=part, async_op=True))
                works.append(dist.broadcast(torch.ones(3), 2, group=part, async_op=True))
            gathered = [torch.zeros(2) for _ in range(world_size)]
            dist.all_gather(gathered, torch.full((2,), float(rank)))
            for work in reversed(works):
                work.wait()
            outcome.append(value.tolist() == [float(root * 100 + turn)] * 50)
            outcome.append(sums.tolist() == [float(sum(range(world_size)))] * 70)
            outcome.append(got[:, 0].tolist() == [float(peer) for peer in range(world_size)])
            outcome.append([tensor[0].item() for tensor in gathered] == [float(peer) for peer in range(world_size)])
    return outcome


def test_movements_keep_their_order_among_reductions(ranks: Ranks) -> None:
    assert all(map(all, ranks.run(_interleaved)))


def _two_go_on(rank: int, world_size: int) -> list[float]:
    """A broadcast waits for rank 2, which waits for a message that rank 0 sends when it has heard from rank 1."""
    value, token = torch.full((3,), float(rank)), torch.zeros(1)
    with group():
        if rank == 2:
            dist.recv(token, 0)
            dist.broadcast(value, 1)
        else:
            work = dist.broadcast(value, 1, async_op=True)
            future = work.get_future()
            assert not future.done()
            peer = 1 - rank
            exchange = [dist.P2POp(dist.isend, torch.ones(1), peer), dist.P2POp(dist.irecv, token, peer)]
            for part in dist.batch_isend_irecv(exchange):
                part.wait()
            if rank == 0:
                dist.send(token, 2)
            assert future.wait()[0] is value
            work.wait()
            assert work.is_completed()
    return value.tolist()


def test_sends_and_receives_do_not_wait_for_an_agreement(ranks: Ranks) -> None:
    assert ranks.run(_two_go_on) == [[1.0] * 3] * 3
