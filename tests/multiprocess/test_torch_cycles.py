# SPDX-License-Identifier: Apache-2.0
"""Groups that come and go leave nothing behind: no thread, descriptor, shared memory or process."""

import gc
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import detcomm
from tests import launch
from tests.torch_tensors import group

PATIENCE_S = 60.0
NUM_CYCLES = 200
NUM_DEFAULT_CYCLES = 30
"""Each connects to the store anew, which takes torch 5 s where a name server does not answer."""

Resources = dict[str, int]


def _resources() -> Resources:
    """What this process holds, by kind."""
    counts: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own
            continue
        counts[f"descriptor {target.partition(':')[0]}"] += 1
    counts["threads"] = len(os.listdir("/proc/self/task"))
    counts["segments"] = Path("/proc/self/maps").read_text().count("memfd:detcomm")
    counts["processes"] = sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))
    counts["named memory"] = sum("detcomm" in name for name in os.listdir("/dev/shm"))
    return dict(counts)


def _use(a_group: dist.ProcessGroup | None, world_size: int) -> None:
    """All parts of a group: reductions here and on its thread, movement, a block."""
    value = torch.ones(1000)
    dist.all_reduce(value, group=a_group)
    work = dist.all_reduce(value, group=a_group, async_op=True)
    dist.broadcast(torch.ones(3), 0, group=a_group)
    work.wait()
    assert value[0] == world_size**2


def _subgroups(rank: int, world_size: int, options: detcomm.Options) -> tuple[Resources, Resources]:
    with group(options):

        def cycle() -> None:
            made = dist.new_group(list(range(world_size)), pg_options=options)
            _use(made, world_size)
            dist.destroy_process_group(made)

        return _before_and_after(cycle, NUM_CYCLES)


def _default_groups(rank: int, world_size: int, options: detcomm.Options) -> tuple[Resources, Resources]:
    def cycle() -> None:
        with group(options):
            _use(None, world_size)

    return _before_and_after(cycle, NUM_DEFAULT_CYCLES)


def _before_and_after(cycle: Callable[[], None], num_cycles: int) -> tuple[Resources, Resources]:
    for _ in range(3):
        cycle()
    before = _settled(None)
    for _ in range(num_cycles):
        cycle()
    return before, _settled(before)


def _settled(expected: Resources | None) -> Resources:
    """Gloo's threads let go some time after their group: when the counts rest, or are what is expected."""
    deadline = time.monotonic() + (PATIENCE_S if expected else 2.0)
    while time.monotonic() < deadline:
        time.sleep(0.2)
        gc.collect()  # torch's default group is in a reference cycle, and holds its store
        counts = _resources()
        if expected and all(count <= expected.get(kind, 0) for kind, count in counts.items()):
            break
    return counts


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_nothing_is_left_of_200_groups(transport: str) -> None:
    options = detcomm.Options(transport=transport)
    for before, after in launch.run(2, _subgroups, options, timeout_s=500):
        assert all(count <= before.get(kind, 0) for kind, count in after.items()), (before, after)


def test_nothing_is_left_of_default_groups() -> None:
    for before, after in launch.run(2, _default_groups, detcomm.Options(), timeout_s=500):
        assert all(count <= before.get(kind, 0) for kind, count in after.items()), (before, after)


def test_the_count_sees_a_leak() -> None:
    descriptor = os.memfd_create("detcomm-leak")
    try:
        with_one = _resources()
    finally:
        os.close(descriptor)
    # Threads of an earlier test's launcher may end meanwhile.
    assert (Counter(with_one) - Counter(_resources()))["descriptor /memfd"] == 1
