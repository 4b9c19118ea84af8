# SPDX-License-Identifier: Apache-2.0
"""DDP's communication hooks run on detcomm unchanged, and keep its bits.

A hook that reduces whole buckets in a smaller type gives equal bits for every bucket size. PowerSGD draws its factors
by bucket, so another bucket size is another algorithm: it gives equal bits for every schedule and transport. (Its
batched form is not here: torch 2.13's cannot run, on any backend.)
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import detcomm
from tests.launch import Ranks
from tests.torch_tensors import bits, group

STEPS = 4
RING = detcomm.Options(association="ring", ring_chunk_elems=4)
OTHER_WAY = detcomm.Options(schedule="oneshot", transport="gloo")

Hook = Callable[[Any, Any], Any]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as standing:
        yield standing


def _power_sgd() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1, random_seed=3
    )


def _bfloat16(state: None, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Under another name, since DDP refuses torch's own on a CPU, by its name."""
    return default_hooks.bf16_compress_hook(state, bucket)


def _hooks() -> dict[str, tuple[Any, Hook]]:
    """By name: the state and the hook."""
    local = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=STEPS)
    return {
        "all-reduce": (None, default_hooks.allreduce_hook),
        "float16": (None, default_hooks.fp16_compress_hook),
        "bfloat16": (None, _bfloat16),
        "PowerSGD": (_power_sgd(), powerSGD_hook.powerSGD_hook),
        "float16 around PowerSGD": (_power_sgd(), default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
        "local SGD, before": (local, post_localSGD_hook.post_localSGD_hook),
    }


def _train(rank: int, world_size: int, options: detcomm.Options | None, bucket_mb: float) -> dict[str, str]:
    """By hook: a digest of the weights after some steps."""
    digests = {}
    with group(options):
        for name, (state, hook) in _hooks().items():
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 24), nn.Tanh(), nn.Linear(24, 4))
            ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
            ddp.register_comm_hook(state, hook)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
            for step in range(STEPS):
                optimizer.zero_grad()
                batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
                ddp(batch * 3.0 ** (rank - 1)).square().sum().backward()
                optimizer.step()
            digests[name] = hashlib.sha256(b"".join(bits(value) for value in model.parameters())).hexdigest()
    return digests


def _replicas(results: list[dict[str, str]]) -> dict[str, str]:
    """Replicas agree."""
    assert all(result == results[0] for result in results)
    return results[0]


def test_hooks_keep_the_bits_of_every_schedule_and_bucket_size(ranks: Ranks) -> None:
    usual = _replicas(ranks.run(_train, None, 25))
    assert len(set(usual.values())) > len(usual) // 2, "the hooks do different things"
    assert _replicas(ranks.run(_train, OTHER_WAY, 25)) == usual
    small = _replicas(ranks.run(_train, None, 0.001))
    differing = {name for name in usual if small[name] != usual[name]}
    assert differing <= {name for name in usual if "PowerSGD" in name}
    # The negative control: another order of additions, other weights, with every hook that adds in float32.
    ring = _replicas(ranks.run(_train, RING, 25))
    assert {name for name in usual if ring[name] != usual[name]} >= {"all-reduce", "PowerSGD"}
