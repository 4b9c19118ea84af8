# SPDX-License-Identifier: Apache-2.0
"""No two ranks touch the same bytes at once, and none waits for ever: by the order of their signals, all schedules."""

import pytest

from detcomm.call import Call, even_shards
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.cuda.peer.program import InPlace
from detcomm.options import Options
from tests import fake_gpu
from tests.fake_peers import Peers
from tests.peer_races import Play

SCHEDULES = [
    ("tree", "direct"), ("tree", "halving"), ("tree", "oneshot"), ("tree", "binomial"), ("tree", "hierarchical"),
    ("linear", "direct"), ("ring", "ring"), ("ring", "direct"),
]  # fmt: skip
COUNT = 3 * 1024 + 5


def _calls(world_size: int) -> list[Call]:
    shards = even_shards(world_size * 400, world_size)
    return [
        Call(Collective.ALL_REDUCE, DType.FLOAT32, COUNT, ReduceOp.SUM),
        Call(Collective.REDUCE, DType.FLOAT32, COUNT, ReduceOp.SUM, root=world_size - 1),
        Call(Collective.REDUCE_SCATTER, DType.FLOAT32, world_size * 400, ReduceOp.SUM, shards),
        Call(Collective.ALL_GATHER, DType.FLOAT32, world_size * 400, None, shards),
    ]


def _places(world_size: int) -> list[list[InPlace]]:
    return [
        [InPlace(False, False)] * world_size,
        [InPlace(True, True)] * world_size,
        [InPlace(rank % 2 == 0, rank % 3 == 0) for rank in range(world_size)],
    ]


@pytest.mark.parametrize(("world_size", "chunk_bytes"), [(3, 2048), (5, 4096), (4, None)])
@pytest.mark.parametrize(("association", "schedule"), SCHEDULES)
def test_no_race_and_no_lock_up(world_size: int, association: str, schedule: str, chunk_bytes: int | None) -> None:
    options = Options(association=association, schedule=schedule, ring_chunk_elems=256, chunk_bytes=chunk_bytes)
    peers = Peers(world_size)
    for call in _calls(world_size):
        if schedule == "binomial" and call.shard_counts is not None:
            continue
        for in_place in _places(world_size):
            programs = peers.programs(call, options, in_place)
            for num_queues in (2, 1):
                found = Play(programs, in_place, num_queues).run()
                assert not found, f"{call.text()}, {in_place[0]}, {num_queues} queues: {found[:3]}"


@pytest.mark.parametrize(
    ("forgets", "in_place", "finds"),
    [
        ("awaited", InPlace(False, False), "and"),
        ("most", InPlace(False, False), "and"),
        ("most", InPlace(True, True), "and"),
        ("done", InPlace(False, False), "stops"),
        ("ready", InPlace(False, False), "stops"),
    ],
)
def test_a_signal_that_is_forgotten_is_found(forgets: str, in_place: InPlace, finds: str) -> None:
    """The negative control: without one kind of signal the same check fails."""
    world_size = 4
    options = Options(schedule="direct", chunk_bytes=1024)
    call = _calls(world_size)[2]
    programs = Peers(world_size).programs(call, options, [in_place] * world_size)
    for program in programs:
        for signal in program.signals:
            setattr(signal, forgets, -1 if forgets == "most" else 0)
    found = Play(programs, [in_place] * world_size, 2).run()
    assert found
    assert all(finds in text for text in found)


def test_events_between_the_streams_are_looked_at() -> None:
    world_size = 4
    call = Call(Collective.ALL_REDUCE, DType.FLOAT32, COUNT, ReduceOp.SUM)
    places = [InPlace(False, False)] * world_size
    programs = Peers(world_size).programs(call, Options(schedule="direct", chunk_bytes=2048), places)
    play = Play(programs, places, 2)
    for rank in play.ranks:
        rank.queues = [[op for op in queue if op.kind != fake_gpu.native.WAIT] for queue in rank.queues]
    assert play.run()
