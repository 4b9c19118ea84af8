# SPDX-License-Identifier: Apache-2.0
"""Data movement through torch.distributed: every bit of every type arrives where it should."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import detcomm
from tests.launch import Ranks
from tests.torch_tensors import bits, form_under_test, group

TYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn, torch.int64]


@pytest.fixture(scope="module", params=[2, 3, 5])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as standing:
        yield standing


def _pattern(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    raw = (torch.arange(count * dtype.itemsize) * 7 + rank * 31).to(torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype)


def _collectives(rank: int, world_size: int) -> list[str]:
    wrong: list[str] = []

    def check(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        if bits(got) != bits(expected):
            wrong.append(f"{name} {got.dtype}")

    with group():
        for dtype in TYPES:
            own = _pattern(rank, 6, dtype)
            every = [_pattern(peer, 6, dtype) for peer in range(world_size)]

            value = own.clone()
            dist.broadcast(value, 1)
            check("broadcast", value, every[1])

            parts = [torch.zeros_like(own) for _ in range(world_size)] if rank == 1 else None
            dist.gather(own, parts, dst=1)
            for peer, part in enumerate(parts or []):
                check(f"gather from {peer}", part, every[peer])

            value = torch.zeros_like(own)
            dist.scatter(value, every if rank == 0 else None, src=0)
            check("scatter", value, own)

            sent = torch.cat([_pattern(10 * rank + peer, 2, dtype) for peer in range(world_size)])
            got = torch.zeros_like(sent)
            dist.all_to_all_single(got, sent)
            expected = torch.cat([_pattern(10 * peer + rank, 2, dtype) for peer in range(world_size)])
            check("all_to_all_single", got, expected)

            # Rank r sends r + p rows of three to rank p.
            rows = [_pattern(10 * rank + peer, 3 * (rank + peer), dtype).reshape(-1, 3) for peer in range(world_size)]
            wanted = [_pattern(10 * peer + rank, 3 * (rank + peer), dtype).reshape(-1, 3) for peer in range(world_size)]
            sizes = [rank + peer for peer in range(world_size)]
            output = torch.zeros((sum(sizes), 3), dtype=dtype)
            dist.all_to_all_single(output, torch.cat(rows), sizes, sizes)
            check("uneven all_to_all_single", output, torch.cat(wanted))

            outputs = [torch.zeros_like(part) for part in wanted]
            dist.all_to_all(outputs, rows)
            check("all_to_all", torch.cat(outputs), torch.cat(wanted))

            outputs = [torch.zeros_like(part) for part in wanted]
            work = dist.all_to_all(outputs, rows, async_op=True)
            work.get_future().wait()
            check("all_to_all future", torch.cat(outputs), torch.cat(wanted))
    return wrong


def test_collectives(ranks: Ranks) -> None:
    assert ranks.run(_collectives) == [[]] * ranks.world_size


def _point_to_point(rank: int, world_size: int) -> list[str]:
    wrong: list[str] = []
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    with group():
        for dtype in TYPES:
            own, expected = _pattern(rank, 5, dtype), _pattern(left, 5, dtype)
            for tag in (0, 7):
                got = torch.zeros_like(own)
                work = dist.isend(own, right, tag=tag)
                source = dist.recv(got, left, tag=tag)
                work.wait()
                if bits(got) != bits(expected) or source != left:
                    wrong.append(f"send and recv {dtype}")
            got = torch.zeros_like(own)
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, own, right), dist.P2POp(dist.irecv, got, left)])
            for work in works:
                work.wait()
            if bits(got) != bits(expected):
                wrong.append(f"batch {dtype}")
        if form_under_test() == "backend":
            return wrong  # torch's wrapper of a Python work has no source rank
        if rank == 0:
            for _ in range(world_size - 1):
                got = torch.zeros(3)
                source = dist.recv(got)
                if bits(got) != bits(_pattern(source, 3, torch.float32)):
                    wrong.append("recv from any")
        else:
            dist.send(_pattern(rank, 3, torch.float32), 0)
    return wrong


def test_point_to_point(ranks: Ranks) -> None:
    assert ranks.run(_point_to_point) == [[]] * ranks.world_size


def _objects(rank: int, world_size: int) -> list[bool]:
    with group():
        gathered = [None] * world_size
        dist.all_gather_object(gathered, {"rank": rank, "more": "x" * 100 * rank})
        shared = ["from", rank] if rank == 0 else [None, None]
        dist.broadcast_object_list(shared, 0)
        collected = [None] * world_size if rank == 0 else None
        dist.gather_object(rank * 11, collected, 0)
        received = [None]
        dist.scatter_object_list(received, [f"for {peer}" for peer in range(world_size)] if rank == 0 else None, 0)
        dist.barrier()
        return [
            gathered == [{"rank": peer, "more": "x" * 100 * peer} for peer in range(world_size)],
            shared == ["from", 0],
            collected == ([peer * 11 for peer in range(world_size)] if rank == 0 else None),
            received == [f"for {rank}"],
        ]


def test_objects(ranks: Ranks) -> None:
    assert ranks.run(_objects) == [[True] * 4] * ranks.world_size


def _refused(rank: int, world_size: int) -> list[str]:
    texts = []
    with group():
        for attempt in (
            lambda: dist.broadcast(torch.zeros(4, 4).t(), 0),
            lambda: dist.all_to_all_single(torch.zeros(world_size + 1), torch.zeros(world_size + 1)),
            lambda: dist.send(torch.zeros(4, 4)[:, 0], (rank + 1) % world_size),
        ):
            try:
                attempt()
                texts.append("not refused")
            except detcomm.UsageError as error:
                texts.append(str(error))
        value = torch.full((3,), float(rank))
        dist.broadcast(value, 0)
        texts.append(str(value.tolist()))
    return texts


def test_wrong_arguments_are_refused_and_the_group_stays_usable(ranks: Ranks) -> None:
    for texts in ranks.run(_refused):
        assert "contiguous" in texts[0]
        assert "do not divide" in texts[1]
        assert "contiguous" in texts[2]
        assert texts[3] == "[0.0, 0.0, 0.0]"
