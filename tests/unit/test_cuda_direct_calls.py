# SPDX-License-Identifier: Apache-2.0
"""The short way of CUDA calls: what it finds, what it leaves to the long way, and what it hands to the communicator."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from detcomm.call import Call, even_shards
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.cuda import direct_calls as module
from detcomm.cuda.direct_calls import CudaDirectCalls
from detcomm.cuda.native_call import Streams
from detcomm.cuda.prepared import Prepared
from detcomm.request import Request


class _Communicator:
    """Has prepared what ``prepared`` holds."""

    rank, world_size = 1, 4

    def __init__(self) -> None:
        self.kernels: Any = type("Kernels", (), {"device": -1})  # what get_device says of tensors of the CPU
        self.prepared: dict[Call, Prepared] = {}
        self.run: list[tuple[Any, ...]] = []

    def prepare(self, call: Call) -> Prepared:
        found = self.prepared[call] = Prepared(call, self.rank, None)
        found.program = "a program"  # type: ignore[assignment]
        return found

    def find_prepared(self, request: Request) -> Prepared | None:
        return self.prepared.get(request.call)

    def run_prepared(self, *args: Any) -> None:
        self.run.append(args)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[_Communicator, CudaDirectCalls]:
    monkeypatch.setattr(module, "_current_device", lambda: -1)
    monkeypatch.setattr(module, "_current_stream", lambda device: 0xA0)
    monkeypatch.setattr(module, "_is_capturing", lambda: False)
    communicator: Any = _Communicator()
    return communicator, CudaDirectCalls(communicator, 0xB0)


def test_a_call_is_found_from_its_second_time_on(parts: tuple[_Communicator, CudaDirectCalls]) -> None:
    communicator, direct = parts
    tensor, op = torch.ones(8), dist.AllreduceOptions().reduceOp
    assert direct.find_all_reduce(tensor, op) is None, "not prepared yet"
    prepared = communicator.prepare(Call(Collective.ALL_REDUCE, DType.FLOAT32, 8, ReduceOp.SUM))
    known = direct.find_all_reduce(tensor, op)
    assert known is not None
    assert known.prepared is prepared
    assert direct.find_all_reduce(torch.zeros(2, 4), op) is known
    for other in (torch.ones(9), torch.ones(8, dtype=torch.int32), torch.ones(4, 4).t()[:2]):
        assert direct.find_all_reduce(other, op) is None
    direct.run(known, 16, 32, 5.0)
    assert communicator.run == [(prepared, "", 16, 32, Streams(0xA0, 0xB0), 5.0)]


def test_other_operations_and_factors_are_not_mixed_up(parts: tuple[_Communicator, CudaDirectCalls]) -> None:
    communicator, direct = parts
    options = dist.AllreduceOptions()
    communicator.prepare(Call(Collective.ALL_REDUCE, DType.FLOAT32, 8, ReduceOp.SUM))
    communicator.prepare(Call(Collective.ALL_REDUCE, DType.FLOAT32, 8, ReduceOp.PREMUL_SUM))
    assert direct.find_all_reduce(torch.ones(8), options.reduceOp) is not None
    options.reduceOp = dist.ReduceOp.MAX
    assert direct.find_all_reduce(torch.ones(8), options.reduceOp) is None
    options.reduceOp = dist._make_nccl_premul_sum(2.0)
    assert direct.find_all_reduce(torch.ones(8), options.reduceOp) is None, "each rank has its own factor"


def test_a_factor_is_read_by_the_long_way_alone(
    parts: tuple[_Communicator, CudaDirectCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may lie on the GPU, where each reading waits for the stream."""

    def read(*args: Any) -> None:
        raise AssertionError("the factor was read")

    monkeypatch.setattr(module.torch_calls, "all_reduce", read)
    monkeypatch.setattr(module.torch_calls, "reduce_scatter", read)
    _, direct = parts
    options = dist.AllreduceOptions()
    options.reduceOp = dist._make_nccl_premul_sum(2.0)
    assert direct.find_all_reduce(torch.ones(8), options.reduceOp) is None
    assert direct.find_reduce_scatter(torch.ones(2), torch.ones(8), options.reduceOp) is None


def test_calls_in_a_graph_take_the_long_way(
    parts: tuple[_Communicator, CudaDirectCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    communicator, direct = parts
    communicator.prepare(Call(Collective.ALL_REDUCE, DType.FLOAT32, 8, ReduceOp.SUM))
    op = dist.AllreduceOptions().reduceOp
    assert direct.find_all_reduce(torch.ones(8), op) is not None
    monkeypatch.setattr(module, "_is_capturing", lambda: True)
    assert direct.find_all_reduce(torch.ones(8), op) is None


def test_shards_may_be_in_place_but_not_overlap_otherwise(parts: tuple[_Communicator, CudaDirectCalls]) -> None:
    communicator, direct = parts
    op = dist.ReduceScatterOptions().reduceOp
    whole = torch.ones(16)
    communicator.prepare(Call(Collective.REDUCE_SCATTER, DType.FLOAT32, 16, ReduceOp.SUM, even_shards(16, 4)))
    communicator.prepare(Call(Collective.ALL_GATHER, DType.FLOAT32, 16, None, even_shards(16, 4)))
    for shard, is_found in ((torch.ones(4), True), (whole[4:8], True), (whole[0:4], False), (whole[5:9], False)):
        assert (direct.find_reduce_scatter(shard, whole, op) is not None) == is_found
        assert (direct.find_all_gather(whole, shard) is not None) == is_found
