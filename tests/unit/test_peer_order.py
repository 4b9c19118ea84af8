# SPDX-License-Identifier: Apache-2.0
"""Programs whose ranks read each other's memory: nothing is read or written too early, and all end."""

from collections.abc import Sequence
from typing import Any

import pytest

from detcomm.call import Call, even_shards
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.cuda import native
from detcomm.cuda.bounded_plan import bounded_peer_plans
from detcomm.cuda.peer.layout import Layout
from detcomm.cuda.peer.program import NOTHING, InPlace, _PeerBuilder, make_peer_program
from detcomm.cuda.peer.signals import Ledger
from detcomm.cuda.stream_order import Span
from detcomm.options import Options
from detcomm.plan import Space
from tests import fake_gpu
from tests.fake_peers import Peers
from tests.gpu_order import Order

SCHEDULES = [
    ("tree", "direct"), ("tree", "halving"), ("tree", "oneshot"), ("tree", "binomial"), ("tree", "hierarchical"),
    ("linear", "direct"), ("ring", "ring"),
]  # fmt: skip
ONE_AT_A_TIME = ["issued", "main first", "side first"]


def _call(collective: Collective, world_size: int, count: int) -> Call:
    if collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
        op = ReduceOp.SUM if collective is Collective.REDUCE_SCATTER else None
        return Call(collective, DType.FLOAT32, count, op, even_shards(count, world_size))
    return Call(collective, DType.FLOAT32, count, ReduceOp.SUM, root=1 if collective is Collective.REDUCE else 0)


def _order(
    world_size: int, block_size: int, options: Options, collectives: Sequence[Collective], in_place: bool, mapped: str
) -> Order:
    peers = Peers(world_size, block_size)
    symmetric = {
        "none": None,
        "all": [InPlace(True, True)] * world_size,
        "some": [InPlace(rank % 2 > 0, rank % 2 > 0) for rank in range(world_size)],
    }[mapped]
    calls = [peers.programs(_call(each, world_size, 240), options, symmetric) for each in collectives]
    return Order(peers, calls, [in_place] * len(calls), [symmetric] * len(calls))


@pytest.mark.parametrize(("association", "schedule"), SCHEDULES)
@pytest.mark.parametrize(
    ("world_size", "block_size", "mapped"), [(3, 4, "none"), (3, 4, "some"), (4, 4, "none"), (5, 2, "some")]
)
def test_all_accesses_have_an_order_and_no_gpu_need_do_two_things_at_once(
    association: str, schedule: str, world_size: int, block_size: int, mapped: str
) -> None:
    """Pieces of 256 bytes are more than slots; the caller writes to its tensors right before and behind each call."""
    options = Options(association=association, schedule=schedule, ring_chunk_elems=32, chunk_bytes=256)
    for pair in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER), (Collective.ALL_GATHER, Collective.REDUCE):
        in_place = pair[0] is Collective.ALL_REDUCE
        order = _order(world_size, block_size, options, pair, in_place, mapped)
        order.run("streams")
        assert not order.races()[:3]
        for choose in ONE_AT_A_TIME if world_size == 3 else ["main first"]:
            _order(world_size, block_size, options, pair, in_place, mapped).run(choose)


@pytest.mark.parametrize(
    ("owner", "left_out", "schedule", "collective"),
    [
        (Ledger, "free_next_slot", "direct", Collective.REDUCE),
        (_PeerBuilder, "_wait_for_readers", "halving", Collective.ALL_GATHER),
        (_PeerBuilder, "finish", "direct", Collective.ALL_REDUCE),
    ],
)
def test_a_wait_that_is_left_out_is_found(
    owner: Any, left_out: str, schedule: str, collective: Collective, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a slot, for bytes that peers read in place, at the end. What else a sync comes behind hides the first two."""
    monkeypatch.setattr(owner, left_out, lambda *_: [])
    monkeypatch.setattr(_PeerBuilder, "_told_before", _nothing_told)
    order = _order(3, 4, Options(schedule=schedule, chunk_bytes=256), [collective], True, "some")
    order.run("streams")
    assert order.races()


def test_a_sync_before_what_its_peers_wait_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_PeerBuilder, "_told_before", _nothing_told)
    arguments = 3, 4, Options(schedule="direct", chunk_bytes=256), [Collective.ALL_REDUCE], True, "none"
    _order(*arguments).run("issued")
    with pytest.raises(AssertionError, match="nobody goes on"):
        _order(*arguments).run("main first")


def test_waits_of_one_sync_add_up() -> None:
    """For a slot of one step and for what was sent before it: the later wait is enough for both, in either order."""
    options = Options(schedule="direct", chunk_bytes=256)
    plan = Peers(2).programs(_call(Collective.REDUCE_SCATTER, 2, 240), options)[0].plan
    for steps in (0, 1), (1, 0):
        ledger = Ledger([0, 1], Layout(plan, {1}))
        for step in range(3):
            ledger.exchange(step, [])
            ledger.expose(step, Span(Space.SCRATCH, 10 * step, 10 * step + 10))
        signals: dict[int, Any] = {}
        read = [span.start for step in steps for span in ledger.wait_for(step, signals)]
        assert signals[1].most == 1, "two of three steps"
        assert sorted(read) == [0, 10]


def _nothing_told(builder: _PeerBuilder, _: Sequence[int]) -> Span:
    return builder._arrived()._replace(start=0, stop=0)


@pytest.mark.parametrize("root", [0, 1])
def test_a_root_that_stages_nothing_does_not_decide_for_all(root: int) -> None:
    """Of the staging area that all ranks have: pieces are cut for those who send."""
    call = Call(Collective.REDUCE, DType.FLOAT32, 3 << 18, ReduceOp.SUM, root=root)
    options = Options(schedule="oneshot", scratch_bytes=1 << 20)
    plans = [*bounded_peer_plans(call, range(4), 4, options, 4, 1 << 20).values()]
    assert max(Layout(plan, set(range(4)) - {plan.rank}).num_bytes for plan in plans) <= 1 << 20
    assert len({len(plan.steps) for plan in plans}) == 1, "all ranks cut alike"


def test_folds_of_many_operands_read_what_they_have_fetched() -> None:
    """A kernel has room for fewer operands that may lie anywhere; a rank alone on its host folds as many as ever."""
    call = Call(Collective.REDUCE, DType.FLOAT32, 2, ReduceOp.SUM)
    options = Options(schedule="oneshot")
    plans = bounded_peer_plans(call, range(8), 129, options, 8, 1 << 20)
    layouts = {rank: Layout(plan, set(range(8)) - {rank}) for rank, plan in plans.items()}
    program = make_peer_program(plans[0], layouts, fake_gpu.Kernels().compiler(), NOTHING)
    assert [op.kind for op in program.ops].count(native.PEER_COPY) == 1
    (fold,) = (op for op in program.ops if op.kind in (native.FOLD, native.PEER_FOLD))
    assert (fold.kind, fold.num_regions) == (native.FOLD, 130)
    assert layouts[0].num_bytes >= plans[0].scratch_bytes
