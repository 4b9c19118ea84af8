# SPDX-License-Identifier: Apache-2.0
"""The guard: every setting that reduces past the process groups is named, the harmless ones are not."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from detcomm.errors import UsageError
from detcomm.megatron import guard
from detcomm.megatron.guard import check

HARMLESS = {
    "tp_comm_overlap": False,
    "symmetric_ar_type": None,
    "nccl_ub": False,
    "use_sharp": False,
    "sharp_enabled_group": None,
    "moe_token_dispatcher_type": "alltoall",
    "moe_flex_dispatcher_backend": "deepep",
    "use_megatron_fsdp": False,
    "context_parallel_size": 1,
    "pipeline_model_parallel_comm_backend": None,
    "use_distributed_optimizer": True,
    "clip_grad": 0.0,
    "inprocess_restart": False,
    "high_priority_stream_groups": [],
}

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tp_comm_overlap", {"tp_comm_overlap": True}),
    ("symmetric_ar_type", {"symmetric_ar_type": "two_shot"}),
    ("nccl_ub", {"nccl_ub": True}),
    ("use_sharp", {"use_sharp": True}),
    ("use_sharp", {"sharp_enabled_group": "dp"}),
    ("deepep", {"moe_token_dispatcher_type": "flex"}),
    ("hybridep", {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}),
    ("ncclep", {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "ncclep"}),
    ("use_megatron_fsdp", {"use_megatron_fsdp": True}),
    ("use_megatron_fsdp", {"use_custom_fsdp": True}),
    ("reduce_scatter_with_fp32_accumulation", {"reduce_scatter_with_fp32_accumulation": True}),
    ("reduce_scatter_with_fp32_accumulation", {"ddp_reduce_scatter_with_fp32_accumulation": True}),
    ("use_ring_exchange_p2p", {"use_ring_exchange_p2p": True}),
    ("inprocess_restart", {"inprocess_restart": True}),
]

WARNED: list[tuple[str, dict[str, Any]]] = [
    ("pipeline_model_parallel_comm_backend", {"pipeline_model_parallel_comm_backend": "nccl"}),
    ("context_parallel_size", {"context_parallel_size": 2}),
    ("clip_grad", {"clip_grad": 1.0}),
    ("high_priority_stream_groups", {"high_priority_stream_groups": ["dp_cp"]}),
]


def _config(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**(HARMLESS | changes))


def test_what_goes_through_the_groups_is_let_through_in_silence() -> None:
    assert check(_config(), SimpleNamespace()) == []


@pytest.mark.parametrize(("setting", "changes"), REFUSED)
def test_what_goes_past_us_is_refused_or_allowed_by_name(setting: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"\n  {setting}: "):
        check(_config(**changes))
    with pytest.warns(RuntimeWarning, match=f"{setting}: "):
        (finding,) = check(_config(**changes), allow=[setting])
    assert finding.setting == setting
    assert finding.refused


@pytest.mark.parametrize(("setting", "changes"), WARNED)
def test_what_weakens_the_promise_is_told(setting: str, changes: dict[str, Any]) -> None:
    with pytest.warns(RuntimeWarning, match=f"{setting}: "):
        assert [finding.setting for finding in check(_config(**changes))] == [setting]


def test_every_refused_setting_is_listed_once_however_many_objects_have_it() -> None:
    both = _config(tp_comm_overlap=True, nccl_ub=True)
    with pytest.raises(UsageError) as caught:
        check(both, SimpleNamespace(nccl_ub=True))
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines if line.startswith("  ")] == ["  tp_comm_overlap", "  nccl_ub"]


def test_an_exact_norm_takes_the_bucket_size_out_of_clipping() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check(_config(clip_grad=1.0), exact_grad_norm=True) == []
        assert check(_config(clip_grad=1.0, use_distributed_optimizer=False)) == []


def test_the_compilers_fusion_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(guard.sys.modules, "torch._inductor.config", SimpleNamespace(_micro_pipeline_tp=True))
    with pytest.raises(UsageError, match="micro_pipeline_tp"):
        check(_config())


@pytest.mark.parametrize("changes", [{"cuda_graph_impl": "local"}, {"enable_cuda_graph": True}])
def test_captured_steps_cannot_be_switched(changes: dict[str, Any]) -> None:
    assert check(_config(**changes)) == []
    assert check(_config(cuda_graph_impl="none"), switched=True) == []
    with pytest.raises(UsageError, match="cuda_graph_impl"):
        check(_config(**changes), switched=True)


def test_a_name_that_allows_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="got tp_comm_overlaps"):
        check(_config(), allow=["tp_comm_overlaps"])


def test_megatrons_own_check_comes_first_and_ours_sees_what_it_made() -> None:
    def validate_args(args: SimpleNamespace, defaults: Any = None) -> SimpleNamespace:
        args.tp_comm_overlap = defaults["tp_comm_overlap"]
        return args

    checked = guard.replacing((), exact_grad_norm=False, switched=False)(validate_args)
    assert checked(_config(), defaults={"tp_comm_overlap": False}).tp_comm_overlap is False
    with pytest.raises(UsageError, match="tp_comm_overlap"):
        checked(_config(), {"tp_comm_overlap": True})


def test_every_case_is_tested() -> None:
    assert {setting for setting, _ in REFUSED + WARNED} | {"micro_pipeline_tp", "cuda_graph_impl"} == set(
        guard.SETTINGS
    )
