# SPDX-License-Identifier: Apache-2.0
"""A selection of torch's own distributed tests on CUDA tensors: what stock NCCL passes here, detcomm passes."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.torch_suite.judgement import last_line
from tests.torch_suite.run import execute
from tests.torch_suite.subjects import CUDA_MEASURE, ON_CUDA, Run

TESTS = (
    *("test_all_reduce_sum_cuda", "test_all_reduce_sum_cuda_async", "test_all_reduce_sum_cuda_complex"),
    *("test_reduce_sum_cuda", "test_reduce_scatter_tensor_cuda", "test_reduce_scatter_v_cuda"),
    *("test_all_gather_cuda", "test_all_gather_v_cuda", "test_all_gather_into_cat_tensor_cuda"),
    *("test_all_gather_into_stack_tensor_cuda", "test_nccl_backend_bool_allreduce", "test_nccl_backend_bool_reduce"),
    *("test_coalescing_manager", "test_coalescing_manager_async", "test_barrier_cuda", "test_broadcast_cuda"),
    *("test_gather_cuda", "test_scatter_cuda", "test_all_to_all_single_unequal_split_cuda", "test_send_recv_nccl"),
    *("test_batch_isend_irecv_nccl", "test_batch_isend_irecv_ring_exchange_nccl"),
    *("test_DistributedDataParallel_non_default_stream", "test_ddp_hook_parity_allreduce", "test_ddp_broadcast_buffer"),
)
NUM_RANKS = 3


def compare(patience_s: float) -> list[str]:
    """Both at once, each on ranks of its own; the suite forks them, so this process must not have started CUDA."""
    runs = [Run(subject, NUM_RANKS) for subject in (CUDA_MEASURE, ON_CUDA)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(runs)) as pool:
        take = partial(execute, folder=Path(folder), tests=TESTS, deadline_s=patience_s)
        stock, ours = pool.map(take, runs)
        logs = [path.read_text()[-1500:] for path in sorted(Path(folder).glob("*.log"))]
        logs += [f"{outcome.test}: {outcome.reason[:3000]}" for outcome in stock.values()][:2]
    passed = [test for test in TESTS if test in stock and stock[test].kind == "passed"]
    lost = [test for test in passed if test not in ours or ours[test].kind != "passed"]
    bad = [outcome for outcome in ours.values() if outcome.is_bad and outcome.test in passed]
    told = "".join(f"\n{outcome.test}: {outcome.reason[-1500:]}" for outcome in bad)
    assert passed, "\n".join(["stock NCCL passes nothing here", *logs])
    assert not lost, f"stock NCCL passes {len(passed)}, detcomm not {lost}{told}\n{logs[0]}"
    others = [
        f"{test}: {stock[test].kind if test in stock else 'no outcome'} ({last_line(stock[test].reason)[:100]})"
        for test in TESTS
        if test not in passed and test in stock
    ]
    return [f"{len(passed)} of {len(TESTS)} tests: stock NCCL and detcomm pass", *others]
