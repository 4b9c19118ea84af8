# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a GPU are hosts of their own to NCCL and to plans; those that do not are left alone."""

import os

import pytest

from detcomm import shared_gpus
from detcomm.options import Options


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in shared_gpus.variables(0):
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)


def test_ranks_that_share_a_gpu_are_hosts_of_their_own() -> None:
    assert shared_gpus.share(rank=3, num_ranks=4, num_gpus=1)
    assert shared_gpus.variables(3)["NCCL_HOSTID"] != shared_gpus.variables(2)["NCCL_HOSTID"]
    assert {name: os.environ[name] for name in shared_gpus.variables(3)} == shared_gpus.variables(3)
    assert Options.from_environment().node_size == 1


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    assert shared_gpus.share(rank=0, num_ranks=2, num_gpus=1)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth0"


def test_ranks_with_a_gpu_each_are_left_alone() -> None:
    assert not shared_gpus.share(rank=1, num_ranks=8, num_gpus=8)
    assert "NCCL_HOSTID" not in os.environ
    assert Options.from_environment().node_size is None
