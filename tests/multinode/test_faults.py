# SPDX-License-Identifier: Apache-2.0
"""A rank or a node that is killed, stopped or cut off in the midst of a collective is named by every survivor, in time.

And nothing is left behind: no process, no open file, no shared memory. Bounds on times are generous, for loaded
machines; what was needed is printed.
"""

import re
import signal
import time
from collections.abc import Collection, Sequence

import pytest

from tests import launch
from tests.multinode.lost_rank import Loss, reduce_until_lost
from tests.multinode.ranks import Job, NodeRanks
from tests.netlab.lab import Lab

BOUND_S = 30.0
"""For seeing a death, and for ending; two seconds are promised on a machine with enough cores."""
NEVER_S = 75.0
"""A timeout that no test waits for: what comes sooner is no timeout."""
TIMEOUT_S = 4.0

TWO_BY_TWO = [0, 0, 1, 1]
FOUR = [0, 1, 2, 3]


def kill_all(lab: Lab, nodes: Collection[int], name: str = "KILL") -> None:
    """Send a signal to everything on some nodes but their first processes."""
    for node in nodes:
        code, output = lab.call(node, ["sh", "-c", f"kill -{name} -1"])
        assert code in (0, 128 + signal.SIGKILL), output


def check(
    results: Sequence[object],
    lost: Sequence[int],
    since_s: float,
    within_s: float,
    kind: str = "TransportError",
    named: Sequence[int] | None = None,
) -> None:
    """Each survivor raised an error that names one of the lost, and ended as if nothing were the matter."""
    for rank, result in enumerate(results):
        if rank in lost:
            continue
        assert isinstance(result, Loss), (rank, result)
        print(f"rank {rank} after {result.at_s - since_s:.2f} s: {result.kind}: {result.text}")
        assert result.kind == kind, result
        numbers = "|".join(str(number) for number in named or lost)
        assert re.search(rf"ranks? [\[0-9, ]*\b({numbers})\b", result.text), result
        assert result.at_s - since_s < within_s, result
        assert "unusable" in result.again, result
        assert result.destroy_s < BOUND_S, result
        assert not result.left_behind, result


def check_nothing_is_left(lab: Lab, nodes: Collection[int]) -> None:
    """No rank and no shared memory on the nodes."""
    for node in nodes:
        code, output = lab.call(
            node, ["sh", "-c", "ls /dev/shm; cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o multinode[.]forker"]
        )
        assert output == "", (node, code, output)


def event_of(job: Job) -> tuple[float, int]:
    """When the victim got its signal, and its process on its node."""
    job.wait_for_file("event")
    at_s, pid = (job.folder / "event").read_text().split()
    return float(at_s), int(pid)


def wait_until_all_reduce(job: Job) -> None:
    """Every rank has the group, and the test's timeout."""
    for rank in range(job.world_size):
        job.wait_for_file(f"started{rank}")


@pytest.mark.parametrize(
    ("placement", "victim", "transport"),
    [
        pytest.param(TWO_BY_TWO, 3, "auto", id="2x2-auto"),
        pytest.param(FOUR, 2, "gloo", id="1x4-gloo", marks=pytest.mark.slow),
        pytest.param(TWO_BY_TWO, 2, "gloo", id="2x2-gloo", marks=pytest.mark.slow),
        pytest.param(TWO_BY_TWO, 0, "auto", id="2x2-auto-with-the-store", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank(lab: Lab, ranks: NodeRanks, placement: list[int], victim: int, transport: str) -> None:
    job = ranks.start(placement, reduce_until_lost, transport, NEVER_S, victim, int(signal.SIGKILL))
    since_s, _ = event_of(job)
    results = job.finish(may_die=True)
    assert results[victim] == launch.Died(-signal.SIGKILL)
    check(results, [victim], since_s, BOUND_S)
    check_nothing_is_left(lab, set(placement))


@pytest.mark.parametrize("weather", ["calm", pytest.param("shaken", marks=pytest.mark.slow)])
def test_a_killed_node(lab: Lab, ranks: NodeRanks, weather: str) -> None:
    if weather == "shaken":
        lab.shake(delay_ms=5, jitter_ms=2, loss_percent=1)
    job = ranks.start([0, 0, 1, 1, 2], reduce_until_lost, "auto", NEVER_S)
    wait_until_all_reduce(job)
    since_s = time.monotonic()
    kill_all(lab, [1])
    results = job.finish(may_die=True)
    assert [results[2], results[3]] == [launch.Died(-signal.SIGKILL)] * 2
    check(results, [2, 3], since_s, BOUND_S)
    check_nothing_is_left(lab, range(3))


@pytest.mark.parametrize("transport", ["auto", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_stopped_rank(lab: Lab, ranks: NodeRanks, transport: str) -> None:
    job = ranks.start(TWO_BY_TWO, reduce_until_lost, transport, TIMEOUT_S, 3, int(signal.SIGSTOP))
    since_s, pid = event_of(job)
    for rank in (0, 1, 2):
        job.wait_for_file(f"result{rank}", TIMEOUT_S + 2 * BOUND_S)
    assert lab.call(1, ["sh", "-c", f"kill -KILL {pid}"])[0] == 0
    results = job.finish(may_die=True)
    check(results, [3], since_s, TIMEOUT_S + BOUND_S, "PeerTimeoutError")
    check_nothing_is_left(lab, range(2))


@pytest.mark.slow
def test_a_stopped_node(lab: Lab, ranks: NodeRanks) -> None:
    job = ranks.start([0, 0, 1, 1, 2], reduce_until_lost, "auto", TIMEOUT_S)
    wait_until_all_reduce(job)
    since_s = time.monotonic()
    kill_all(lab, [1], "STOP")
    for rank in (0, 1, 4):
        job.wait_for_file(f"result{rank}", TIMEOUT_S + 2 * BOUND_S)
    kill_all(lab, [1])
    check(job.finish(may_die=True), [2, 3], since_s, TIMEOUT_S + BOUND_S, "PeerTimeoutError")
    check_nothing_is_left(lab, range(3))


@pytest.mark.parametrize("weather", ["calm", pytest.param("shaken", marks=pytest.mark.slow)])
def test_a_node_that_is_cut_off(lab: Lab, ranks: NodeRanks, weather: str) -> None:
    """Both sides name the other, though only one of them can reach the store."""
    if weather == "shaken":
        lab.shake(delay_ms=5, jitter_ms=2, loss_percent=1)
    job = ranks.start(TWO_BY_TWO, reduce_until_lost, "auto", TIMEOUT_S, None, 0, weather == "shaken")
    wait_until_all_reduce(job)
    since_s = time.monotonic()
    lab.cut(1)
    results = job.finish()
    check(results, [2, 3], since_s, TIMEOUT_S + BOUND_S, "PeerTimeoutError")
    check(results, [0, 1], since_s, TIMEOUT_S + BOUND_S, "PeerTimeoutError")
    check_nothing_is_left(lab, range(2))


@pytest.mark.slow
def test_a_node_that_is_cut_off_long_before_the_timeout(lab: Lab, ranks: NodeRanks) -> None:
    """The connections of the watch find it on both sides, where nobody would wait for so long."""
    job = ranks.start(TWO_BY_TWO, reduce_until_lost, "auto", NEVER_S)
    wait_until_all_reduce(job)
    since_s = time.monotonic()
    lab.cut(1)
    results = job.finish()
    check(results, [2, 3], since_s, 20.0 + BOUND_S)
    check(results, [0, 1], since_s, 20.0 + BOUND_S)


@pytest.mark.slow
@pytest.mark.parametrize("dark", [2, 0])
def test_a_node_without_power(lab: Lab, ranks: NodeRanks, dark: int) -> None:
    """It closes nothing as it goes; node 0 takes the store with it."""
    placement = [0, 1, 1, 2, 2]
    job = ranks.start(placement, reduce_until_lost, "auto", NEVER_S)
    wait_until_all_reduce(job)
    since_s = time.monotonic()
    lost = [rank for rank, node in enumerate(placement) if node == dark]
    lab.cut(dark)
    kill_all(lab, [dark])
    check(job.finish(may_die=True), lost, since_s, 20.0 + BOUND_S)
    check_nothing_is_left(lab, range(3))
