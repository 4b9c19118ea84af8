# SPDX-License-Identifier: Apache-2.0
"""Wrong calls through torch.distributed: refused before anything is sent, or a mismatch that every rank names."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import detcomm
from tests.launch import Ranks
from tests.torch_tensors import bits, form_under_test, group


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as standing:
        yield standing


def _error_of(attempt: Any) -> tuple[str, str]:
    try:
        attempt()
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def _still_works(world_size: int) -> bool:
    value = torch.ones(5)
    dist.all_reduce(value)
    return value.tolist() == [float(world_size)] * 5


def _refusals(rank: int, world_size: int) -> list[tuple[str, str]]:
    with group() as pg:
        attempts = [
            lambda: dist.all_reduce(torch.ones(4, 4).t()),
            lambda: dist.all_reduce(torch.ones(4, dtype=torch.float8_e4m3fn)),
            lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32), dist._make_nccl_premul_sum(2.0)),
            lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.BXOR),
            lambda: pg.allreduce([torch.ones(4, dtype=torch.complex64)], dist.ReduceOp.MAX),
            lambda: dist.all_reduce(torch.ones(4, device="meta")),
            lambda: dist.reduce_scatter_tensor(torch.ones(4), torch.ones(4 * world_size + 1)),
            lambda: dist.all_gather_into_tensor(torch.ones(4), torch.ones(4)),
            lambda: dist.all_gather([torch.ones(4)] * (world_size - 1), torch.ones(4)),
            lambda: pg.allreduce([torch.ones(4, dtype=torch.complex64).conj()]),
        ]
        outcomes = [_error_of(attempt) for attempt in attempts]
        assert _still_works(world_size)
    return outcomes


def test_what_has_no_specified_bits_is_refused_at_once(ranks: Ranks) -> None:
    expected = [
        ("UsageError", "contiguous"),
        ("UnsupportedError", "float8_e4m3fn"),
        ("UnsupportedError", "premul_sum is not defined on int32"),
        ("UnsupportedError", "bxor is not defined on float32"),
        ("UnsupportedError", "max is not defined on complex64"),
        # In the other form torch's dispatcher answers for meta tensors, and asks nobody.
        ("UnsupportedError", "meta") if form_under_test() == "process_group" else ("no error", ""),
        ("UsageError", "elements"),
        ("UsageError", "elements"),
        ("UsageError", "output tensors"),
        ("UsageError", "lazy conjugate"),
    ]
    for outcomes in ranks.run(_refusals):
        for (kind, text), (expected_kind, fragment) in zip(outcomes, expected, strict=True):
            assert kind == expected_kind
            assert fragment in text


def _mismatches(rank: int, world_size: int, transport: str) -> list[tuple[str, str, bool]]:
    outcomes = []
    odd = rank == 1
    with group(detcomm.Options(transport=transport)):
        value = torch.full((6,), float(rank + 1))
        before = bits(value)
        wide = value.double()

        def asynchronous() -> None:
            dist.all_reduce(value[:5] if odd else value, async_op=True).wait()

        def coalesced() -> None:
            with dist._coalescing_manager():
                dist.all_reduce(value[:2])
                dist.all_reduce(value[2:5] if odd else value[2:])

        for attempt in (
            lambda: dist.all_reduce(value[:5] if odd else value),
            lambda: dist.all_reduce(wide if odd else value),
            lambda: dist.all_reduce(value, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
            lambda: dist.reduce(value, 1 if odd else 0),
            lambda: dist.reduce_scatter_tensor(torch.empty(2), value) if odd else dist.all_reduce(value),
            asynchronous,
            coalesced,
        ):
            kind, text = _error_of(attempt)
            outcomes.append((kind, text, bits(value) == before))
        assert _still_works(world_size)
    return outcomes


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_ranks_that_disagree_all_raise_and_go_on(ranks: Ranks, transport: str) -> None:
    fragments = [
        ("float32[5]", "float32[6]"),
        ("float32[6]", "float64[6]"),
        ("max", "sum"),
        ("root 0", "root 1"),
        ("reduce_scatter", "all_reduce"),
        ("float32[5]", "float32[6]"),
        ("float32[3]", "float32[4]"),
    ]
    results = ranks.run(_mismatches, transport)
    for outcomes in zip(*results, strict=True):
        assert {kind for kind, _, _ in outcomes} == {"MismatchError"}
        assert all(unchanged for _, _, unchanged in outcomes)
        assert len({text for _, text, _ in outcomes}) == 1
    for (_, text, _), pair in zip(results[0], fragments, strict=True):
        assert all(fragment in text for fragment in pair), text
        assert "rank 1" in text


def _create(rank: int, world_size: int, how: str) -> tuple[str, str]:
    odd = rank == 1
    if how == "options":
        options: Any = detcomm.Options(association="linear" if odd else "tree")
    elif how == "kind":
        options = {"association": "tree"} if odd else None
    else:
        options = None
        if odd:
            os.environ["DETCOMM_RING_CHUNK_ELEMS"] = "many"
    outcome = _error_of(lambda: dist.init_process_group("detcomm", pg_options=options))
    os.environ.pop("DETCOMM_RING_CHUNK_ELEMS", None)
    assert not dist.is_initialized()
    return outcome


def test_different_options_are_named_by_every_rank(ranks: Ranks) -> None:
    for kind, text in ranks.run(_create, "options"):
        assert kind == "MismatchError"
        assert "association" in text
        assert "linear" in text


@pytest.mark.parametrize(("how", "fragment"), [("kind", "dict"), ("environment", "DETCOMM_RING_CHUNK_ELEMS")])
def test_the_refusal_of_one_rank_is_told_to_all(ranks: Ranks, how: str, fragment: str) -> None:
    for rank, (kind, text) in enumerate(ranks.run(_create, how)):
        assert kind == ("UsageError" if rank == 1 else "MismatchError")
        assert fragment in text


def _destroyed(rank: int, world_size: int) -> list[tuple[str, str]]:
    with group() as pg:
        pass
    value = torch.ones(3)
    return [_error_of(lambda: pg.allreduce([value]).wait()), _error_of(lambda: pg.broadcast([value]).wait())]


def test_a_destroyed_group_says_so(ranks: Ranks) -> None:
    for outcomes in ranks.run(_destroyed):
        assert all(kind == "UsageError" and "destroyed" in text for kind, text in outcomes)


def _aborted(rank: int, world_size: int) -> list[tuple[str, str]]:
    with group() as pg:
        if rank == 1:
            pg.abort()
        outcomes = [_error_of(lambda: dist.all_reduce(torch.ones(3))) for _ in range(2)]
        outcomes.append(_error_of(lambda: dist.broadcast(torch.ones(3), 0)))
    return outcomes


def test_after_an_abort_every_call_on_every_rank_raises(ranks: Ranks) -> None:
    for rank, outcomes in enumerate(ranks.run(_aborted)):
        assert all(kind in ("TransportError", "PeerTimeoutError") for kind, _ in outcomes), outcomes
        assert "unusable" in outcomes[-1][1] or rank == 1
