# SPDX-License-Identifier: Apache-2.0
"""The groups that Megatron Core makes, by its own descriptions, and what goes through each.

Read in the sources of megatron-core 0.16.1 and 0.19.2. Names and text alone: knows nothing of torch.
"""

from fnmatch import fnmatchcase

import attrs

WORLD = "WORLD"
"""The group of all ranks. Megatron does not describe it, since it makes it by ``init_process_group``."""


@attrs.frozen
class Traffic:
    """What goes through one kind of group.

    Args:
        pattern: of the description; ``*`` stands for any text.
        short: Megatron's own abbreviation of the kind.
        reduces: floating-point sums, whose order decides bits; empty if there are none.
        moves: everything else.
    """

    pattern: str
    short: str
    reduces: str
    moves: str = ""


_GRADIENTS = "gradients: reduce-scatter (distributed optimizer) or all-reduce"
_EXPERT_GRADIENTS = "gradients of experts: reduce-scatter or all-reduce"
_PARAMETERS = "parameters: all-gather, broadcast"
_CHECKPOINTS = "checkpoints: gather, scatter"

TRAFFIC = (
    Traffic(WORLD, "world", "gradient norm of layer-wise optimizers, logged sums", "objects, barriers, P2P at PP=2"),
    Traffic("TENSOR_MODEL_PARALLEL_GROUP", "tp", "activations and their gradients, cross entropy", "all-gather"),
    Traffic("DATA_PARALLEL_GROUP", "dp", _GRADIENTS, _PARAMETERS),
    Traffic("DATA_PARALLEL_GROUP_WITH_CP", "dp", _GRADIENTS, _PARAMETERS),
    Traffic("DATA_PARALLEL_GROUP_WITH_CP_AG", "dp", "", "parameters: all-gather"),
    Traffic("DATA_PARALLEL_GROUP*_WITH_GTP_REMAT", "dp", _GRADIENTS, _PARAMETERS),
    Traffic("DATA_PARALLEL_GROUP_GLOO", "gloo", "", _CHECKPOINTS),
    Traffic("DATA_PARALLEL_GROUP_WITH_CP_GLOO", "gloo", "", _CHECKPOINTS),
    Traffic("INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "dp", _GRADIENTS, _PARAMETERS),
    Traffic("INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO", "gloo", "", _CHECKPOINTS),
    Traffic("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "dist_opt", "gradient norm"),
    Traffic("HYBRID_DP_CP_GROUP_*", "dp", "attention of context parallelism, logged sums", "keys and values"),
    Traffic("CONTEXT_PARALLEL_GROUP", "cp", "attention gradients: reduce-scatter", "keys and values"),
    Traffic("HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L*", "cp", "attention gradients: reduce-scatter", "keys and values"),
    Traffic("MODEL_PARALLEL_GROUP", "mp", "gradient norm, without the distributed optimizer", "overflow flags"),
    Traffic("PIPELINE_MODEL_PARALLEL_GROUP", "pp", "gradients of shared conditioning, metrics", "activations: P2P"),
    Traffic("EMBEDDING_GROUP", "embd", "gradients of tied embeddings"),
    Traffic("POSITION_EMBEDDING_GROUP", "embd", "gradients of tied position embeddings"),
    Traffic("TENSOR_AND_DATA_PARALLEL_GROUP", "tp_dp", "router statistics", "amax of FP8: MAX"),
    Traffic("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", "tp_dp", "router statistics", "amax of FP8: MAX"),
    Traffic("TENSOR_AND_CONTEXT_PARALLEL_GROUP", "tp_cp", "auxiliary losses of routers", "token counts"),
    Traffic("EXPERT_MODEL_PARALLEL_GROUP", "ep", "", "tokens: all-to-all"),
    Traffic("EXPERT_TENSOR_PARALLEL_GROUP", "etp", "activations of experts: reduce-scatter", "all-gather"),
    Traffic(
        "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "tp_ep", "tokens: reduce-scatter (all-gather dispatcher)", "tokens"
    ),
    Traffic("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", "tp_ep_pp", "gradient norm of experts"),
    Traffic("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP", "tp_ep_pp", "gradient norm of experts"),
    Traffic("EXPERT_DATA_PARALLEL_GROUP", "edp", _EXPERT_GRADIENTS, _PARAMETERS),
    Traffic("EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", "edp", _EXPERT_GRADIENTS, _PARAMETERS),
    Traffic("EXPERT_DATA_PARALLEL_GROUP_AG", "edp", "", "parameters: all-gather"),
    Traffic("EXPERT_DATA_PARALLEL_GROUP_GLOO", "gloo", "", _CHECKPOINTS),
    Traffic("HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L*", "edp", _EXPERT_GRADIENTS, _PARAMETERS),
    Traffic("HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_GLOO_L*", "gloo", "", _CHECKPOINTS),
    Traffic("HIERARCHICAL_CONTEXT_PARALLEL_GROUP_GLOO_L*", "gloo", "", _CHECKPOINTS),
    Traffic("GTP_WEIGHT_REMAT_GROUP", "gtp", "gradients of weights made again: reduce-scatter", "weights: all-gather"),
    Traffic("EXPERT_GTP_WEIGHT_REMAT_GROUP", "gtp", "gradients of weights made again", "weights: all-gather"),
    Traffic("TP_BOOTSTRAP_GROUP_MPI", "mpi", "", "start of TransformerEngine's user buffers"),
)

SHORT_NAMES = tuple(dict.fromkeys(traffic.short for traffic in TRAFFIC if traffic.short not in ("gloo", "mpi")))
"""What a policy may call a kind of group: ``tp``, ``dp``, ``pp``, …"""


def traffic_of(description: str | None) -> Traffic | None:
    """What goes through the groups of this description; ``None`` if no known release of Megatron makes them."""
    if description is None:
        return None
    return next((traffic for traffic in TRAFFIC if fnmatchcase(description, traffic.pattern)), None)


def patterns_of(name: str) -> tuple[str, ...]:
    """The descriptions that a policy means by ``name``: those of a short name, or the pattern itself."""
    found = tuple(traffic.pattern for traffic in TRAFFIC if traffic.short == name)
    return found if name in SHORT_NAMES else (name,)


def is_known(pattern: str) -> bool:
    """Whether a pattern could match a group of a known release of Megatron."""
    return any(fnmatchcase(traffic.pattern, pattern) or fnmatchcase(pattern, traffic.pattern) for traffic in TRAFFIC)
