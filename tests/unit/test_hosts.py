# SPDX-License-Identifier: Apache-2.0
"""Hosts and the aligned blocks that follow from them."""

from collections.abc import Callable

import pytest

from detcomm.hosts import block_size, host_identity, num_hosts


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("a", 1),
        ("aa", 2),
        ("ab", 1),
        ("aaa", 4),
        ("aaaa", 4),
        ("aabb", 2),
        ("abab", 1),
        ("aabbc", 2),
        ("aaaabbbb", 4),
        ("aaaabbbbcc", 4),
        ("aaabbbbb", 1),  # 3 + 5
        ("aaaaaabbbbbb", 2),  # nodes of six
        ("aaaaaaaaaaaabbbbbbbbbbbb", 4),  # nodes of twelve
        ("aabbbbbb", 2),
        ("aaaaaaaa", 8),
        ("aaaaa", 8),
    ],
)
def test_block_size(hosts: str, expected: int) -> None:
    assert block_size(hosts) == expected


@pytest.mark.parametrize("world_size", [3, 5, 7, 8, 24])
@pytest.mark.parametrize("node_size", [1, 2, 3, 4, 6, 8])
def test_no_block_crosses_a_host_and_no_larger_block_would_fit(world_size: int, node_size: int) -> None:
    hosts = [str(rank // node_size) for rank in range(world_size)]
    size = block_size(hosts)

    def fits(candidate: int) -> bool:
        return all(
            len({hosts[r] for r in range(world_size) if r // candidate == block}) <= 1 for block in range(world_size)
        )

    assert fits(size)
    assert size >= world_size or not fits(2 * size)


def test_node_size_overrides_the_hosts() -> None:
    assert block_size("abababab", node_size=4) == 4
    assert block_size("aaaaaaaa", node_size=2) == 2
    assert block_size("aaaaaaaaaaaa", node_size=6) == 2
    assert block_size("aaa", node_size=64) == 4


def test_host_identity() -> None:
    assert host_identity({"DETCOMM_HOST_ID": "rack 7"}) == "rack 7"
    assert host_identity({}) == host_identity({"DETCOMM_HOST_ID": ""})
    assert host_identity({}).count("/") == 2
    assert num_hosts(["a", "b", "a"]) == 2


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("detcomm.hosts._boot_id", lambda: "another boot"),
        ("socket.gethostname", lambda: "another-name"),
        ("detcomm.hosts._namespace", lambda kind: "4026531840-another" if kind == "net" else "pid"),
    ],
)
def test_each_part_of_a_host_tells_hosts_apart(
    place: str, value: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = host_identity({})
    assert host_identity({}) == before
    monkeypatch.setattr(place, value)
    assert host_identity({}) != before
    assert host_identity({"DETCOMM_HOST_ID": "rack 7"}) == "rack 7"
