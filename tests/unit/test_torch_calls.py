# SPDX-License-Identifier: Apache-2.0
"""From torch's tensors and operations to the core's requests: same memory, right calls, refusals."""

import pytest
import torch
import torch.distributed as dist

from detcomm import torch_calls
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.errors import UnsupportedError, UsageError

SUM = dist.ReduceOp.SUM


@pytest.mark.parametrize("dtype", [getattr(torch, dtype.value) for dtype in DType])
def test_bytes_are_the_tensors_own_memory(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 4, dtype=dtype)
    data = torch_calls.tensor_bytes(tensor[1:])
    assert data.size == 8 * tensor.element_size()
    data[:] = 1
    assert bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == bytes(4 * tensor.element_size()) + b"\1" * data.size


def test_a_leaf_that_requires_a_gradient_and_an_empty_tensor_have_bytes() -> None:
    assert torch_calls.tensor_bytes(torch.ones(3, requires_grad=True)).size == 12
    assert torch_calls.tensor_bytes(torch.empty(0, 5)).size == 0
    assert torch_calls.tensor_bytes(torch.tensor(1.0)).size == 4


def test_complex_messages_are_described_by_their_reals() -> None:
    (request,) = torch_calls.all_reduce("all_reduce", [torch.ones(5, dtype=torch.complex64)], SUM).requests
    assert (request.call.dtype, request.call.count, request.label) == (DType.FLOAT32, 10, "complex64")


def test_types_without_arithmetic_are_moved_as_bytes() -> None:
    part, whole = torch.zeros(4, dtype=torch.float8_e5m2), torch.zeros(12, dtype=torch.float8_e5m2)
    (request,) = torch_calls.all_gather("all_gather", [whole], [part], 3).requests
    assert request.call.dtype is DType.UINT8
    assert request.call.shard_counts == (4, 4, 4)
    assert request.label == "float8_e5m2"
    with pytest.raises(UnsupportedError, match="float8_e5m2"):
        torch_calls.all_reduce("all_reduce", [part], SUM)


@pytest.mark.parametrize("op", [op for op in ReduceOp if op is not ReduceOp.PREMUL_SUM])
def test_operations_as_objects_and_as_names(op: ReduceOp) -> None:
    named = getattr(dist.ReduceOp, op.name)
    options = dist.AllreduceOptions()
    options.reduceOp = named
    assert torch_calls.operation(named) == torch_calls.operation(options.reduceOp) == (op, None)


@pytest.mark.parametrize("factor", [2.5, torch.tensor([2.5]), torch.tensor(2.5, dtype=torch.float64)])
def test_the_factor_of_a_premultiplied_sum(factor: float | torch.Tensor) -> None:
    assert torch_calls.operation(dist._make_nccl_premul_sum(factor)) == (ReduceOp.PREMUL_SUM, 2.5)


def test_adjacent_parts_are_used_where_they_lie() -> None:
    whole = torch.arange(10.0)
    batch = torch_calls.reduce_scatter_list(torch.empty(3), list(torch.split(whole, [4, 3, 3])), SUM, 1)
    assert batch.gather is None
    assert batch.requests[0].input.__array_interface__["data"][0] == whole.data_ptr()


def test_scattered_parts_pass_through_staging_memory() -> None:
    parts = [torch.full((size,), float(size)) for size in (4, 0, 3)]
    batch = torch_calls.reduce_scatter_list(torch.empty(3), parts, SUM, 2)
    assert batch.gather is not None
    parts[2].fill_(9.0)  # read when the call runs, not when it is made
    batch.gather()
    assert batch.requests[0].input.view("float32").tolist() == [4.0] * 4 + [9.0] * 3

    batch = torch_calls.all_gather_lists([parts], [torch.empty(4)], 0)
    assert batch.scatter is not None
    batch.requests[0].output.view("float32")[:] = range(7)
    batch.scatter()
    assert [part.tolist() for part in parts] == [[0.0, 1.0, 2.0, 3.0], [], [4.0, 5.0, 6.0]]


def test_the_root_alone_has_an_output_of_a_reduce() -> None:
    tensor = torch.ones(4)
    for rank in range(3):
        (request,) = torch_calls.reduce(tensor, SUM, 1, rank).requests
        assert request.call.collective is Collective.REDUCE
        assert request.call.root == 1
        assert request.output.size == (16 if rank == 1 else 0)


@pytest.mark.parametrize(
    ("tensor", "error", "fragment"),
    [
        (torch.ones(4, 4).t(), UsageError, "strides"),
        (torch.ones(8)[::2], UsageError, "contiguous"),
        (torch.ones(4, device="meta"), UnsupportedError, "meta"),
        (torch.ones(4).to_sparse(), UnsupportedError, "sparse"),
        (torch.ones(4, dtype=torch.complex64).conj(), UsageError, "conjugate"),
        (torch.ones(4, dtype=torch.complex64).conj().imag.reshape(1, 4)[:, :1], UsageError, "negation"),
    ],
)
def test_refused_tensors(tensor: torch.Tensor, error: type[Exception], fragment: str) -> None:
    with pytest.raises(error, match=fragment):
        torch_calls.check_dense("all_reduce", tensor)


@pytest.mark.parametrize("alone", [True, False])
def test_a_group_of_one_refuses_what_others_refuse(alone: bool) -> None:
    make = torch_calls.all_reduce_alone if alone else torch_calls.all_reduce
    with pytest.raises(UnsupportedError, match="bxor"):
        make("all_reduce", [torch.ones(4)], dist.ReduceOp.BXOR)
    with pytest.raises(UnsupportedError, match="float8"):
        make("all_reduce", [torch.ones(4, dtype=torch.float8_e5m2)], SUM)


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: torch_calls.reduce_scatter("rs", [torch.empty(2)], [torch.empty(7)], SUM, 3),
        lambda: torch_calls.reduce_scatter("rs", [torch.empty(2)], [torch.empty(6).double()], SUM, 3),
        lambda: torch_calls.reduce_scatter("rs", [torch.empty(2)], [], SUM, 3),
        lambda: torch_calls.all_gather("ag", [torch.empty(7)], [torch.empty(2)], 3),
        lambda: torch_calls.reduce_scatter_list(torch.empty(3), [torch.empty(2)] * 3, SUM, 0),
        lambda: torch_calls.all_gather_lists([[torch.empty(2)] * 3], [torch.empty(3)], 0),
        lambda: torch_calls.all_gather_lists([[torch.empty(2).int()] * 3], [torch.empty(2)], 0),
    ],
)
def test_sizes_and_types_that_do_not_fit_are_refused(attempt: object) -> None:
    with pytest.raises(UsageError):
        attempt()  # type: ignore[operator]


def test_the_number_of_an_operation_is_its_own() -> None:
    """Calls are looked up by it: two operations under one number would be one."""
    ops = [dist.ReduceOp(getattr(dist.ReduceOp, op.name)) for op in ReduceOp if op is not ReduceOp.PREMUL_SUM]
    factors = [dist._make_nccl_premul_sum(factor) for factor in (2.0, 3.0)]
    numbers = [torch_calls.operation_number(op) for op in (*ops, factors[0])]
    assert numbers == [op.op.value for op in (*ops, factors[0])]
    assert len(set(numbers)) == len(ReduceOp)
    assert torch_calls.operation_number(factors[1]) == numbers[-1]
