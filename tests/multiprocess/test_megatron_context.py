# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: its collectives on the groups that Megatron makes, and a whole model where it can be built."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from tests import inputs, launch, oracle
from tests.multiprocess import megatron_cases as cases
from tests.torch_tensors import bits, tensor

cases.need_megatron()

WORLD_SIZE = 4
COUNT = 24


@pytest.mark.parametrize("size", [2, 4])
def test_the_collectives_of_context_parallelism(size: int) -> None:
    found = launch.run(WORLD_SIZE, _collectives, size)
    assert all(all(checks.values()) for checks in found), found


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="Megatron Core's context parallelism is TransformerEngine's attention, which is not installed",
)
@pytest.mark.parametrize("size", [2, 4])
def test_a_model_with_context_parallelism(size: int) -> None:
    layout = cases.Layout(f"CP{size}", WORLD_SIZE, ("--cp", str(size)))
    assert cases.bits(cases.train(layout)) == cases.bits(cases.train(layout, variation=cases.BUCKETS_3000))


def _collectives(rank: int, world_size: int, size: int) -> dict[str, bool]:
    """What attention over a split sequence and the reduction of its gradients do; whether each has the right bits."""
    import detcomm.megatron
    from examples.megatron import cpu_patches

    cpu_patches.apply()
    from megatron.core import parallel_state

    detcomm.megatron.initialize()
    parallel_state.initialize_model_parallel(context_parallel_size=size, create_gloo_process_groups=False)
    checks = {
        f"{dtype}: {name}": right
        for dtype in ("float32", "bfloat16")
        for name, right in [
            *_over_context(rank, dtype, parallel_state.get_context_parallel_group()),
            _over_data_and_context(rank, dtype, parallel_state.get_data_parallel_group(with_context_parallel=True)),
        ]
    }
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return checks


def _over_context(rank: int, dtype: str, group: dist.ProcessGroup) -> Iterator[tuple[str, bool]]:
    members = dist.get_process_group_ranks(group)
    me, size = members.index(rank), len(members)
    given = [inputs.make(dtype, COUNT * size, WORLD_SIZE, 7)[member] for member in members]
    parts = [tensor(part, dtype) for part in given]
    own = parts[me]

    gathered = own.new_empty(COUNT * size * size)
    dist.all_gather_into_tensor(gathered, own, group=group)
    yield "all-gather of keys and values", bits(gathered) == bits(torch.cat(parts))

    shard = own.new_empty(COUNT)
    dist.reduce_scatter_tensor(shard, own, group=group)
    sums = tensor(oracle.reduce(given, dtype, "sum"), dtype)
    yield "reduce-scatter of their gradients", bits(shard) == bits(sums.chunk(size)[me])

    exchanged = torch.empty_like(own)
    dist.all_to_all_single(exchanged, own, group=group)
    yield "all-to-all of heads", bits(exchanged) == bits(torch.cat([part.chunk(size)[me] for part in parts]))

    block, right = own, True
    for turn in range(1, size):
        incoming = torch.empty_like(block)
        send = dist.P2POp(dist.isend, block, members[(me + 1) % size], group)
        recv = dist.P2POp(dist.irecv, incoming, members[(me - 1) % size], group)
        for work in dist.batch_isend_irecv([send, recv]):
            work.wait()
        block = incoming
        right = right and bits(block) == bits(parts[(me - turn) % size])
    yield "ring of blocks", right


def _over_data_and_context(rank: int, dtype: str, group: dist.ProcessGroup) -> tuple[str, bool]:
    """As Megatron reduces its buckets: coalesced and asynchronous."""
    given = inputs.make(dtype, COUNT, WORLD_SIZE, 8)
    gradient = tensor(given[rank], dtype)
    with _coalescing_manager(group, async_ops=True) as manager:
        for bucket in (gradient[:5], gradient[5:]):
            dist.all_reduce(bucket, group=group)
    manager.wait()
    expected = oracle.reduce([given[member] for member in dist.get_process_group_ranks(group)], dtype, "sum")
    return "reduction of gradients over data and context", bits(gradient) == bits(tensor(expected, dtype))
