# SPDX-License-Identifier: Apache-2.0
"""A small GPT of Megatron Core's own layers, for every kind of parallelism that they know.

Knows nothing of backends: Megatron finds its groups in ``parallel_state``.
"""

import argparse

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY = 256
"""Bytes."""


class Norm(torch.nn.LayerNorm):
    """LayerNorm that sequence parallelism may use: its weights say that their gradients are partial sums over TP.

    Megatron's own wrapper of torch's norm refuses sequence parallelism, since only Apex's and TransformerEngine's norms
    carry this mark.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def config(arguments: argparse.Namespace) -> TransformerConfig:
    """Megatron's configuration of the model and of how it is split.

    Raises:
        SystemExit: context parallelism without TransformerEngine, whose attention it is.
    """
    if arguments.cp > 1 and not specs.HAVE_TE:
        raise SystemExit("--cp above 1 needs TransformerEngine: the attention of context parallelism lies there")
    dtype = torch.bfloat16 if arguments.dtype == "bf16" else torch.float32
    moe = {}
    if arguments.num_experts:
        moe = {
            "num_moe_experts": arguments.num_experts,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-2,
            "moe_token_dispatcher_type": arguments.dispatcher,
        }
    return TransformerConfig(
        num_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_attention_heads=arguments.heads,
        add_bias_linear=not arguments.num_experts,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # Weights are drawn on the CPU, whole, and then cut: the same model on a CPU, on a GPU and for every TP size.
        use_cpu_initialization=True,
        tensor_model_parallel_size=arguments.tp,
        pipeline_model_parallel_size=arguments.pp,
        virtual_pipeline_model_parallel_size=arguments.vpp,
        context_parallel_size=arguments.cp,
        expert_model_parallel_size=arguments.ep,
        sequence_parallel=arguments.sp,
        bf16=arguments.dtype == "bf16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # As Megatron's own arguments set it: two stages that send in both directions at once must not batch.
        overlap_p2p_comm=arguments.vpp is not None,
        batch_p2p_comm=arguments.vpp is None,
        deterministic_mode=True,
        # Fused kernels are Apex's and TransformerEngine's.
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **moe,
    )


def build(config: TransformerConfig, arguments: argparse.Namespace) -> list[torch.nn.Module]:
    """This rank's part of the model: one chunk for each virtual stage, on its device."""
    chunks = []
    for stage in range(arguments.vpp or 1):
        vp_stage = stage if arguments.vpp else None
        chunk: torch.nn.Module = GPTModel(
            config,
            _layers(config, arguments, vp_stage),
            vocab_size=VOCABULARY,
            max_sequence_length=arguments.sequence,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=not arguments.untied,
            vp_stage=vp_stage,
        )
        chunk.model_type = "encoder_or_decoder"  # type: ignore[assignment]
        if torch.cuda.is_available():
            chunk.cuda()
        if config.bf16:
            chunk = Float16Module(config, chunk)
        chunks.append(chunk)
    return chunks


def _layers(config: TransformerConfig, arguments: argparse.Namespace, vp_stage: int | None) -> object:
    if config.context_parallel_size > 1:
        return specs.get_gpt_layer_with_transformer_engine_spec(num_experts=arguments.num_experts)
    layer = specs.get_gpt_layer_local_spec(num_experts=arguments.num_experts)
    for name in ("input_layernorm", "pre_mlp_layernorm"):
        if getattr(layer.submodules, name) is not IdentityOp:
            setattr(layer.submodules, name, Norm)
    return TransformerBlockSubmodules([layer] * get_num_layers_to_build(config, vp_stage), layer_norm=Norm)
