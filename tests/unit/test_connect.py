# SPDX-License-Identifier: Apache-2.0
"""Which transports are tried for which hosts. What connecting does is in ``tests/multiprocess/test_connect.py``."""

import pytest

from detcomm.connect import candidates
from detcomm.errors import UsageError

CASES = [
    ("auto", "aaaa", ("shared_memory", "gloo")),
    ("auto", "aabb", ("hybrid", "gloo")),
    ("auto", "abab", ("hybrid", "gloo")),
    ("auto", "abcd", ("gloo",)),
    ("gloo", "aaaa", ("gloo",)),
    ("mpi", "aabb", ("mpi",)),
    ("shared_memory", "aa", ("shared_memory",)),
    ("hybrid", "aaab", ("hybrid",)),
]


@pytest.mark.parametrize(("transport", "hosts", "expected"), CASES)
def test_candidates_follow_from_option_and_hosts(transport: str, hosts: str, expected: tuple[str, ...]) -> None:
    assert candidates(transport, list(hosts)) == expected


def test_what_cannot_connect_the_hosts_is_refused() -> None:
    with pytest.raises(UsageError, match="shared_memory connects ranks of one host, and these are on 2"):
        candidates("shared_memory", list("aab"))
    with pytest.raises(UsageError, match="nccl carries CUDA tensors"):
        candidates("nccl", list("aa"))
