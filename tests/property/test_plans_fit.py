# SPDX-License-Identifier: Apache-2.0
"""The plans of all ranks fit each other byte for byte, and send what the schedule's formula says."""

from hypothesis import given
from hypothesis import strategies as st

from detcomm.association import Association
from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp, partial_dtype
from detcomm.lockstep import check_plans
from detcomm.partition import partition
from detcomm.planner import PlanOptions, make_plan
from detcomm.schedules import parse
from detcomm.tuning import legal_schedules

DTYPES = [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT64, DType.INT8]


@st.composite
def calls(draw: st.DrawFn) -> tuple[Call, int]:
    world_size = draw(st.integers(1, 12))
    collective = draw(st.sampled_from(list(Collective)))
    dtype = draw(st.sampled_from(DTYPES))
    op = ReduceOp.SUM if collective.reduces else None
    if collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
        shards = tuple(draw(st.lists(st.integers(0, 40), min_size=world_size, max_size=world_size)))
        return Call(collective, dtype, sum(shards), op, shards), world_size
    root = draw(st.integers(0, world_size - 1)) if collective is Collective.REDUCE else 0
    return Call(collective, dtype, draw(st.integers(0, 300)), op, root=root), world_size


@st.composite
def planned(draw: st.DrawFn) -> tuple[Call, int, PlanOptions]:
    call, world_size = draw(calls())
    association = Association(draw(st.sampled_from(["tree", "linear", "ring"])), draw(st.sampled_from([1, 3, 64])))
    schedule = draw(st.sampled_from(legal_schedules(call, association, world_size, draw(st.sampled_from([1, 2, 4])))))
    options = PlanOptions(
        association=association,
        accumulate=draw(st.sampled_from(["float32", "wire"])),
        schedule=schedule.text,
        chunk_bytes=draw(st.sampled_from([None, 64, 200])),
        lag=draw(st.sampled_from([1, 2])),
    )
    return call, world_size, options


@given(planned())
def test_plans_of_all_ranks_fit(case: tuple[Call, int, PlanOptions]) -> None:
    call, world_size, options = case
    plans = [make_plan(call, rank, world_size, options) for rank in range(world_size)]
    sent = check_plans(plans)
    assert len({plan.schedule_fingerprint for plan in plans}) == 1
    schedule = parse(options.schedule, world_size)
    wide = partial_dtype(call.op or ReduceOp.MAX, call.dtype, options.accumulate).itemsize
    assert sent == sum(
        schedule.traffic(call.collective, share.cell, call.root).num_bytes(share.count, call.dtype.itemsize, wide)
        for share in partition(call, options.association, schedule, world_size)
    )


@given(planned(), st.integers(2, 60))
def test_scratch_does_not_grow_with_the_message(case: tuple[Call, int, PlanOptions], factor: int) -> None:
    """With a fixed piece size, only the number of pieces grows."""
    call, world_size, options = case
    if call.shard_counts is not None or options.chunk_bytes is None or options.association.name == "ring":
        return
    longer = Call(call.collective, call.dtype, 4096 * factor, call.op, root=call.root)
    long = Call(call.collective, call.dtype, 4096, call.op, root=call.root)
    assert (
        make_plan(longer, 0, world_size, options).scratch_bytes == make_plan(long, 0, world_size, options).scratch_bytes
    )


@given(calls())
def test_pieces_and_shares_cover_each_element_once(case: tuple[Call, int]) -> None:
    call, world_size = case
    for association in (Association("tree"), Association("ring", 7)):
        for schedule in legal_schedules(call, association, world_size):
            seen: list[int] = []
            for share in partition(call, association, schedule, world_size):
                for index in range(-(-share.count // 5)):
                    for start, stop in share.piece(index, 5):
                        seen += range(start, stop)
                        assert (
                            association.name == "tree"
                            or call.shard_counts is not None
                            or all(
                                association.element_class(i, world_size) == share.cell.element_class
                                for i in range(start, stop)
                            )
                        )
            assert sorted(seen) == list(range(call.count))
