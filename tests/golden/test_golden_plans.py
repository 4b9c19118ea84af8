# SPDX-License-Identifier: Apache-2.0
"""Plans under review: a change of a schedule or of the lowering shows up as a diff of a text file.

``UPDATE_GOLDEN=1 pytest tests/golden`` writes the files anew; look at the diff before you commit it.
"""

import os
from pathlib import Path

import pytest

from detcomm.association import Association
from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.planner import PlanOptions, make_plan

PLANS = Path(__file__).parent / "plans"


def _call(collective: Collective, dtype: DType, count: int, world_size: int, root: int = 0) -> Call:
    sharded = collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
    shards = tuple(count // world_size + (rank < count % world_size) for rank in range(world_size))
    op = ReduceOp.SUM if collective.reduces else None
    return Call(collective, dtype, count, op, shards if sharded else None, root)


TREE, LINEAR, RING = Association("tree"), Association("linear"), Association("ring", 16)
CASES = {
    "direct_all_reduce_3": (Collective.ALL_REDUCE, DType.FLOAT32, 100, 3, PlanOptions(TREE, schedule="direct")),
    "direct_pipelined_3": (
        Collective.ALL_REDUCE,
        DType.FLOAT32,
        100,
        3,
        PlanOptions(TREE, schedule="direct", chunk_bytes=192),
    ),
    "direct_pipelined_lag2_3": (
        Collective.ALL_REDUCE,
        DType.FLOAT32,
        100,
        3,
        PlanOptions(TREE, schedule="direct", chunk_bytes=192, lag=2),
    ),
    "halving_reduce_scatter_5_bf16": (
        Collective.REDUCE_SCATTER,
        DType.BFLOAT16,
        51,
        5,
        PlanOptions(TREE, schedule="halving"),
    ),
    "hierarchical_all_reduce_6": (
        Collective.ALL_REDUCE,
        DType.FLOAT32,
        200,
        6,
        PlanOptions(TREE, schedule="hierarchical", block_size=2),
    ),
    "binomial_reduce_6": (Collective.REDUCE, DType.FLOAT32, 40, 6, PlanOptions(TREE, schedule="binomial")),
    "oneshot_linear_4_wire": (
        Collective.ALL_REDUCE,
        DType.FLOAT16,
        33,
        4,
        PlanOptions(LINEAR, "wire", schedule="oneshot"),
    ),
    "ring_all_reduce_4": (Collective.ALL_REDUCE, DType.FLOAT32, 150, 4, PlanOptions(RING, schedule="ring")),
    "ring_direct_4": (Collective.ALL_REDUCE, DType.FLOAT32, 150, 4, PlanOptions(RING, schedule="direct")),
    "ring_all_gather_3": (Collective.ALL_GATHER, DType.UINT8, 10, 3, PlanOptions(TREE, schedule="ring")),
}


@pytest.mark.parametrize("name", CASES)
def test_plans_are_as_reviewed(name: str) -> None:
    collective, dtype, count, world_size, options = CASES[name]
    call = _call(collective, dtype, count, world_size, root=world_size - 1 if name.endswith("reduce_6") else 0)
    text = "\n".join(make_plan(call, rank, world_size, options).text() for rank in range(world_size))
    path = PLANS / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"the plans of {name} changed; see this module's docstring"


def test_every_golden_file_has_its_case() -> None:
    assert {path.stem for path in PLANS.glob("*.txt")} == set(CASES)


def test_a_plan_is_a_value() -> None:
    collective, dtype, count, world_size, options = CASES["ring_direct_4"]
    call = _call(collective, dtype, count, world_size)
    first, second = (make_plan(call, 1, world_size, options) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first.fingerprint == second.fingerprint
    other = make_plan(call, 2, world_size, options)
    assert other.fingerprint != first.fingerprint
    assert other.schedule_fingerprint == first.schedule_fingerprint
