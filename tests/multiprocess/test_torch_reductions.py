# SPDX-License-Identifier: Apache-2.0
"""Every reduction through torch.distributed gives the bits of the oracle, for every form that torch has of it."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import detcomm
from tests import inputs, oracle
from tests.launch import Ranks
from tests.torch_tensors import bits, group, tensor

OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
CASES = [
    ("float32", "sum"),
    ("float32", "avg"),
    ("bfloat16", "sum"),
    ("float16", "avg"),
    ("float64", "product"),
    ("float32", "max"),
    ("bfloat16", "min"),
    ("int32", "sum"),
    ("int64", "avg"),
    ("uint8", "bxor"),
    ("uint16", "sum"),
    ("bool", "bor"),
    ("complex64", "sum"),
    ("complex128", "avg"),
]
CHUNK = 7
"""Elements of a chunk of ring: small, so that short messages have every class."""


@pytest.fixture(scope="module", params=[3, 4, 5])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as standing:
        yield standing


def _wrong(name: str, dtype: str, op: str, got: torch.Tensor, expected: oracle.Array) -> list[str]:
    return [] if bits(got) == inputs.bits(expected).tobytes() else [f"{name} {op} {dtype}"]


def _reference(
    contributions: list[oracle.Array], dtype: str, op: str, options: detcomm.Options, **more: object
) -> oracle.Array:
    return oracle.reduce(
        contributions,
        dtype,
        op,
        association=options.association,
        ring_chunk_elems=options.ring_chunk_elems,
        accumulate=options.accumulate,
        **more,  # type: ignore[arg-type]
    )


def _all_forms(rank: int, world_size: int, options: detcomm.Options) -> list[str]:
    wrong: list[str] = []
    with group(options):
        for seed, (dtype, op) in enumerate(CASES):
            count = 12 * world_size
            given = inputs.make(dtype, count, world_size, seed)
            mine = given[rank]
            whole = _reference(given, dtype, op, options)

            value = tensor(mine, dtype)
            dist.all_reduce(value, OPS[op])
            wrong += _wrong("all_reduce", dtype, op, value, whole)

            value = tensor(mine, dtype)
            dist.reduce(value, 1, OPS[op])
            wrong += _wrong("reduce", dtype, op, value, whole if rank == 1 else mine)

            shard = slice(rank * 12, rank * 12 + 12)
            scattered = _reference([part[shard] for part in given], dtype, op, options, shard_owner=rank)
            output = torch.empty(12, dtype=getattr(torch, dtype))
            dist.reduce_scatter_tensor(output, tensor(mine, dtype), OPS[op])
            wrong += _wrong("reduce_scatter_tensor", dtype, op, output, scattered)

            parts = [torch.clone(part) for part in tensor(mine, dtype).chunk(world_size)]
            output = torch.empty(12, dtype=getattr(torch, dtype))
            dist.reduce_scatter(output, parts, OPS[op])
            wrong += _wrong("reduce_scatter", dtype, op, output, scattered)

            value = tensor(mine, dtype)
            inside = value[shard]
            dist.reduce_scatter_tensor(inside, value, OPS[op])
            wrong += _wrong("reduce_scatter_tensor in place", dtype, op, inside, scattered)
    return wrong


@pytest.mark.parametrize(
    "options",
    [
        detcomm.Options(),
        detcomm.Options(association="linear", accumulate="wire"),
        detcomm.Options(association="ring", ring_chunk_elems=CHUNK),
    ],
    ids=lambda options: options.numerics_id,
)
def test_bits_of_every_form(ranks: Ranks, options: detcomm.Options) -> None:
    assert ranks.run(_all_forms, options) == [[]] * ranks.world_size


def _uneven(rank: int, world_size: int) -> list[str]:
    wrong: list[str] = []
    sizes = [3 * peer for peer in range(world_size)]
    starts = [sum(sizes[:peer]) for peer in range(world_size)]
    given = inputs.make("float32", sum(sizes), world_size, 5)
    mine = tensor(given[rank], "float32")
    own = slice(starts[rank], starts[rank] + sizes[rank])
    with group():
        expected = oracle.reduce([part[own] for part in given], "float32", "sum")
        for parts in (list(mine.split(sizes)), [part.clone() for part in mine.split(sizes)]):
            output = torch.empty(sizes[rank])
            dist.reduce_scatter(output, parts)
            wrong += _wrong("uneven reduce_scatter", "float32", "sum", output, expected)
        shared = given[0]
        for whole in (torch.zeros(sum(sizes)), None):
            outputs = list(whole.split(sizes)) if whole is not None else [torch.zeros(size) for size in sizes]
            dist.all_gather(outputs, tensor(shared[own], "float32"))
            wrong += _wrong("uneven all_gather", "float32", "", torch.cat(outputs), shared)
    return wrong


def test_lists_of_uneven_parts(ranks: Ranks) -> None:
    assert ranks.run(_uneven) == [[]] * ranks.world_size


def _premultiplied(rank: int, world_size: int) -> list[str]:
    wrong: list[str] = []
    factors = inputs.factors(world_size)
    with group():
        for dtype in ("float32", "bfloat16", "complex64"):
            given = inputs.make(dtype, 50, world_size, 3)
            expected = oracle.reduce(given, dtype, "premul_sum", factors=factors)
            for factor in (factors[rank], torch.tensor([factors[rank]], dtype=torch.float64)):
                value = tensor(given[rank], dtype)
                dist.all_reduce(value, dist._make_nccl_premul_sum(factor))
                wrong += _wrong("all_reduce", dtype, "premul_sum", value, expected)
    return wrong


def test_premultiplied_sum(ranks: Ranks) -> None:
    assert ranks.run(_premultiplied) == [[]] * ranks.world_size


def _gathered(rank: int, world_size: int) -> list[str]:
    wrong: list[str] = []
    types = [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn]
    with group():
        for dtype in types:
            raw = torch.arange(16 * world_size * dtype.itemsize, dtype=torch.uint8)
            every = (raw % 2 if dtype is torch.bool else raw).view(dtype)
            mine = every.chunk(world_size)[rank].clone()
            output = torch.zeros_like(every)
            dist.all_gather_into_tensor(output, mine)
            parts = [torch.zeros_like(mine) for _ in range(world_size)]
            dist.all_gather(parts, mine)
            inside = torch.zeros_like(every)
            inside.chunk(world_size)[rank].copy_(mine)
            dist.all_gather_into_tensor(inside, inside.chunk(world_size)[rank])
            for name, got in (("tensor", output), ("list", torch.cat(parts)), ("in place", inside)):
                if bits(got) != bits(every):
                    wrong.append(f"{name} {dtype}")
    return wrong


def test_all_gather_keeps_every_bit_of_every_type(ranks: Ranks) -> None:
    assert ranks.run(_gathered) == [[]] * ranks.world_size


def _shapes(rank: int, world_size: int) -> list[str]:
    wrong: list[str] = []
    with group():
        given = inputs.make("float32", 120, world_size, 9)
        expected = oracle.reduce(given, "float32", "sum")
        scalar = tensor(given[rank][:1], "float32").reshape(())
        dist.all_reduce(scalar)
        wrong += _wrong("scalar", "float32", "sum", scalar, expected[:1])
        channels_last = tensor(given[rank].reshape(2, 3, 4, 5), "float32").to(memory_format=torch.channels_last)
        dist.all_reduce(channels_last)
        wrong += _wrong("channels last", "float32", "sum", channels_last, expected)
        leaf = tensor(given[rank], "float32").requires_grad_()
        dist.all_reduce(leaf)
        wrong += _wrong("leaf that requires a gradient", "float32", "sum", leaf, expected)
        middle = tensor(given[rank], "float32")
        dist.all_reduce(middle[10:21])
        wrong += _wrong("slice", "float32", "sum", middle[10:21], expected[10:21])
        wrong += _wrong("around a slice", "float32", "", middle[21:], given[rank][21:])
        for empty in (torch.empty(0), torch.empty(3, 0, 2)):
            dist.all_reduce(empty)
            dist.all_gather_into_tensor(torch.empty(0), empty.reshape(-1))
    return wrong


def test_shapes_and_layouts(ranks: Ranks) -> None:
    assert ranks.run(_shapes) == [[]] * ranks.world_size


def _order_matters(rank: int, world_size: int) -> list[bytes]:
    given = inputs.make("float32", 512, world_size, 1)
    results = []
    for association in ("tree", "linear", "ring"):
        with group(detcomm.Options(association=association, ring_chunk_elems=CHUNK)):
            value = tensor(given[rank], "float32")
            dist.all_reduce(value)
            results.append(bits(value))
    return results


def test_the_inputs_can_tell_the_associations_apart(ranks: Ranks) -> None:
    """The negative control of this file: another order of additions gives other bits."""
    for results in ranks.run(_order_matters):
        assert len(set(results)) == (2 if ranks.world_size == 3 else 3) or len(set(results)) == 3


def _sparse(rank: int, world_size: int) -> list[str]:
    wrong: list[str] = []
    given = inputs.make("float32", 60, world_size, 2)
    with group():
        for num_rows in (20, 0):
            dense = tensor(given[rank], "float32").reshape(20, 3)
            dense[[row for row in range(20) if (row + rank) % 3 == 0 or row >= num_rows]] = 0
            value = dense.to_sparse(1)
            dist.all_reduce(value)
            dist.all_reduce(dense)
            if bits(value.to_dense()) != bits(dense + 0.0):
                wrong.append(f"{num_rows} rows")
    with group(detcomm.Options(association="ring")):
        try:
            dist.all_reduce(dense.to_sparse(1))
            wrong.append("ring was not refused")
        except detcomm.UnsupportedError:
            pass
    return wrong


def test_sparse_sum_has_the_bits_of_the_dense_one(ranks: Ranks) -> None:
    assert ranks.run(_sparse) == [[]] * ranks.world_size
