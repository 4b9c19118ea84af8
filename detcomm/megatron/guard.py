# SPDX-License-Identifier: Apache-2.0
"""What in a configuration of Megatron sums past the process groups, where no order of ours holds.

Reads attributes by name, so that it takes the parsed arguments of a script, a ``TransformerConfig``, a
``DistributedDataParallelConfig`` or an ``OptimizerConfig``, of any release. Knows the settings, not their parsers.
"""

import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from detcomm.errors import UsageError

MODULE, FUNCTION = "megatron.training.arguments", "validate_args"

Holds = Callable[[Any], bool]


@attrs.frozen
class Finding:
    """One setting that takes bits out of our hands.

    Args:
        setting: its name; what ``allow`` takes.
        why: what goes past the groups, and what to do.
        refused: whether it ends the run; the rest are warnings.
    """

    setting: str
    why: str
    refused: bool

    def __str__(self) -> str:
        return f"{self.setting}: {self.why}"


@attrs.frozen
class _Case:
    setting: str
    holds: Holds
    why: str
    refused: bool = True


def _on(*names: str) -> Holds:
    return lambda config: any(getattr(config, name, None) for name in names)


def _flex(backend: str) -> Holds:
    def holds(config: Any) -> bool:
        if getattr(config, "moe_token_dispatcher_type", None) != "flex":
            return False
        # The first backend of the flexible dispatcher, also in releases that name none.
        return (getattr(config, "moe_flex_dispatcher_backend", None) or "deepep") == backend

    return holds


def _ring_attention(config: Any) -> bool:
    return (getattr(config, "context_parallel_size", None) or 1) > 1


def _clips_shards(config: Any) -> bool:
    return bool(getattr(config, "use_distributed_optimizer", False)) and (getattr(config, "clip_grad", None) or 0) > 0


def _async_symmetric_memory(_: Any) -> bool:
    # Never imports the compiler for the question.
    inductor = sys.modules.get("torch._inductor.config")
    return bool(getattr(inductor, "_micro_pipeline_tp", False))


_OTHER_DISPATCHER = "adds the experts' outputs in its own kernels; use the alltoall or the allgather dispatcher"

CASES = (
    _Case(
        "tp_comm_overlap",
        _on("tp_comm_overlap"),
        "TransformerEngine's user buffers reduce inside its GEMMs, past torch.distributed; turn it off",
    ),
    _Case(
        "symmetric_ar_type",
        _on("symmetric_ar_type"),
        "all-reduces of tensor parallelism run in symmetric memory, past torch.distributed; leave it unset",
    ),
    _Case(
        "micro_pipeline_tp",
        _async_symmetric_memory,
        "torch's compiler fuses reduce-scatters into GEMMs over symmetric memory; turn off _micro_pipeline_tp",
    ),
    _Case(
        "nccl_ub",
        _on("nccl_ub"),
        "it allocates by NCCL, for NCCL's own reductions; turn it off, and see detcomm.symmetric_memory",
    ),
    _Case(
        "use_sharp",
        _on("use_sharp", "sharp_enabled_group"),
        "switches of the network sum in an order of their own; turn it off",
    ),
    _Case("deepep", _flex("deepep"), f"DeepEP {_OTHER_DISPATCHER}"),
    _Case("hybridep", _flex("hybridep"), f"HybridEP {_OTHER_DISPATCHER}"),
    _Case("ncclep", _flex("ncclep"), f"NCCL's EP {_OTHER_DISPATCHER}"),
    _Case(
        "use_megatron_fsdp",
        _on("use_megatron_fsdp", "use_custom_fsdp"),
        "Megatron-FSDP has reductions and buffers of its own, which nobody has seen on detcomm",
    ),
    _Case(
        "reduce_scatter_with_fp32_accumulation",
        _on("reduce_scatter_with_fp32_accumulation", "ddp_reduce_scatter_with_fp32_accumulation"),
        "sums locally by torch.sum, whose order follows the size of a bucket; turn it off: "
        "accumulate=float32 of detcomm sums in float32 and rounds once",
    ),
    _Case(
        "use_ring_exchange_p2p", _on("use_ring_exchange_p2p"), "needs a patched torch, of which detcomm knows nothing"
    ),
    _Case(
        "inprocess_restart", _on("inprocess_restart"), "restarts by aborting NCCL inside torch; detcomm ends instead"
    ),
    _Case(
        "pipeline_model_parallel_comm_backend",
        _on("pipeline_model_parallel_comm_backend"),
        "Megatron names the backend of the pipeline's groups itself, and no policy reaches them; leave it unset",
        refused=False,
    ),
    _Case(
        "context_parallel_size",
        _ring_attention,
        "attention merges its partial results in TransformerEngine's kernels, in rank order; the messages are ours",
        refused=False,
    ),
    _Case(
        "clip_grad",
        _clips_shards,
        "with the distributed optimizer the gradient norm, and so every weight, follows the bucket size; "
        "exact_grad_norm makes it the same for all of them",
        refused=False,
    ),
    _Case(
        "high_priority_stream_groups",
        _on("high_priority_stream_groups", "nccl_communicator_config_path"),
        "settings of NCCL's communicators have no effect on fixed-order groups",
        refused=False,
    ),
)

_CAPTURED = _Case(
    "cuda_graph_impl",
    lambda config: (getattr(config, "cuda_graph_impl", None) or "none") != "none" or _on("enable_cuda_graph")(config),
    "a captured step keeps the order of its capture, so it cannot be switched between steps; turn one of the two off",
)

SETTINGS = tuple(case.setting for case in (*CASES, _CAPTURED))


def find(config: Any, *, exact_grad_norm: bool = False, switched: bool = False) -> list[Finding]:
    """The findings in one object with Megatron's settings as attributes.

    Args:
        exact_grad_norm: whether ``initialize`` was called with it.
        switched: whether it was called with steps.
    """
    return [
        Finding(case.setting, case.why, case.refused)
        for case in ((*CASES, _CAPTURED) if switched else CASES)
        if case.holds(config) and not (exact_grad_norm and case.setting == "clip_grad")
    ]


def check(
    *configs: Any, allow: Iterable[str] = (), exact_grad_norm: bool = False, switched: bool = False
) -> list[Finding]:
    """Refuse settings that go past us, warn of those that weaken what is promised.

    Args:
        configs: parsed arguments, or configuration objects of Megatron.
        allow: settings to warn of instead.
        exact_grad_norm, switched: see ``find``.

    Returns:
        All findings, those that were allowed too.

    Raises:
        UsageError: with every refused setting and its reason; or ``allow`` names what is no setting here.
    """
    allowed = set(allow)
    if unknown := sorted(allowed - set(SETTINGS)):
        raise UsageError(f"allow: expected some of {', '.join(SETTINGS)}, got {', '.join(unknown)}")
    found = [
        finding for config in configs for finding in find(config, exact_grad_norm=exact_grad_norm, switched=switched)
    ]
    findings = list(dict.fromkeys(found))
    refused = [finding for finding in findings if finding.refused and finding.setting not in allowed]
    if refused:
        lines = "".join(f"\n  {finding}" for finding in refused)
        raise UsageError(
            f"Megatron is set to reduce past detcomm:{lines}\nallow a setting by name to go on all the same"
        )
    for finding in findings:
        warnings.warn(f"detcomm.megatron: {finding}", RuntimeWarning, stacklevel=2)
    return findings


def replacing(
    allow: tuple[str, ...], exact_grad_norm: bool, switched: bool
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``validate_args`` of Megatron's training loop, followed by ``check``."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def validate_args(args: Any, *rest: Any, **options: Any) -> Any:
            result = original(args, *rest, **options)
            check(args, allow=allow, exact_grad_norm=exact_grad_norm, switched=switched)
            return result

        return validate_args

    return make
