# SPDX-License-Identifier: Apache-2.0
"""What is set, kept and refused in the environment; and what the exit-signal handler is told of our backend."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from detcomm.errors import UsageError
from detcomm.megatron import environment, exit_signal
from detcomm.megatron.routing import _settings_for_nccl


@pytest.fixture(autouse=True)
def switches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Calls of torch's switch, which would hold for all tests that follow."""
    calls: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", calls.append)
    return calls


def test_absent_variables_are_set_and_others_are_kept(switches: list[bool]) -> None:
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "MAMBA_DETERMINISTIC": "1"}
    assert environment.require_deterministic_kernels(environ) == ("NVTE_ALLOW_NONDETERMINISTIC_ALGO=0",)
    assert environ == {
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "MAMBA_DETERMINISTIC": "1",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }
    assert switches == [True]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1"),
        ("MAMBA_DETERMINISTIC", "0"),
        ("CAUSAL_CONV1D_DETERMINISTIC", "0"),
    ],
)
def test_a_contradiction_is_refused_and_nothing_is_changed(name: str, value: str, switches: list[bool]) -> None:
    environ = {name: value}
    with pytest.raises(UsageError, match=f"{name}: expected .* got '{value}'"):
        environment.require_deterministic_kernels(environ)
    assert environ == {name: value}
    assert not switches


def _raise(_: Any) -> None:
    raise RuntimeError


@pytest.mark.parametrize("backend", ["detcomm", "undefined", "custom"])
def test_the_exit_signal_handler_takes_our_backend(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    get_device = exit_signal.replacing(_raise)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert get_device() == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert get_device() == torch.device("cuda")
    assert get_device(2) == torch.device("cuda:2")


def test_the_exit_signal_handler_stays_megatrons_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    assert exit_signal.replacing(lambda local_rank: ("megatron", local_rank))(3) == ("megatron", 3)


class _Config:
    cga_cluster_size = 2
    min_ctas = -(1 << 31)
    max_ctas = -(1 << 31)
    net_name = "IB"


class _NcclOptions:
    is_high_priority_stream = True
    config = _Config()


def test_settings_for_nccl_are_told_by_name() -> None:
    assert _settings_for_nccl(None) == ()
    assert _settings_for_nccl(_NcclOptions()) == ("is_high_priority_stream", "cga_cluster_size=2", "net_name=IB")
