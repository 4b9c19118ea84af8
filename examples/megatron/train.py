#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT with Megatron Core, every group on detcomm, and prints hashes of gradients and weights per step.

    torchrun --nproc-per-node 4 examples/megatron/train.py --tp 2 --distributed-optimizer --overlap-grad-reduce

See README.md beside this file. The training loop is Megatron's usual one; what is detcomm's is in ``_start``.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import detcomm.megatron
from detcomm import golden
from examples.megatron import arguments as command_line
from examples.megatron import cpu_patches

cpu_patches.apply()  # before Megatron is imported: it binds some of these names

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from examples.megatron import checkpoint, fingerprint, model, text  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the arguments say, as one rank of the job."""
    run(argv)
    return 0


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """As ``main``; what ``--out`` gets: the arguments, and per step hashes, loss and time."""
    arguments = command_line.parse(argv)
    _start(arguments)
    try:
        record = train(arguments)
        if arguments.out and dist.get_rank() == 0:
            Path(arguments.out).write_text(json.dumps(record, indent=1) + "\n")
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return record


def _start(arguments: Any) -> None:
    """Initialise torch.distributed before Megatron does, then Megatron's groups, which take over its backend."""
    torch.set_num_threads(1)
    torch.compiler.set_stance(
        "force_eager"
    )  # Megatron compiles small functions; here compiling costs more than it saves
    if arguments.backend == "detcomm":
        detcomm.megatron.initialize(exact_grad_norm=arguments.exact_norm)
    else:  # the control: all the same but the backend
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        dist.init_process_group(
            f"cpu:gloo,cuda:{arguments.backend}" if torch.cuda.is_available() else arguments.backend
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=arguments.tp,
        pipeline_model_parallel_size=arguments.pp,
        virtual_pipeline_model_parallel_size=arguments.vpp,
        context_parallel_size=arguments.cp,
        expert_model_parallel_size=arguments.ep,
        create_gloo_process_groups=False,
    )
    # Stages draw other weights; all else that a rank draws follows from its place in the model.
    torch.manual_seed(arguments.seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
    tensor_parallel.model_parallel_cuda_manual_seed(arguments.seed)


def train(arguments: Any) -> dict[str, Any]:
    """Train on the groups that stand; see ``run``."""
    config = model.config(arguments)
    chunks = _wrap(config, model.build(config, arguments), arguments)
    optimizer = get_megatron_optimizer(_optimizer_config(arguments), chunks, use_gloo_process_groups=False)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if arguments.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in chunks]
        if len(chunks) == 1:
            config.no_sync_func = config.no_sync_func[0]
    contract = detcomm.megatron.checkpoint_state() if arguments.backend == "detcomm" else None
    first = 0
    if arguments.load:
        if contract is not None:
            detcomm.megatron.check_checkpoint_state(checkpoint.read_contract(arguments.load), arguments.force_load)
        first = checkpoint.load(arguments.load, chunks, optimizer)
    learned = text.read(arguments.text)
    steps = []
    with golden.Recorder(arguments.golden, config={"seed": arguments.seed, "batch": arguments.global_batch}) as run:
        for step in range(first, arguments.steps):
            steps.append({"step": step} | _step(step, learned, chunks, optimizer, config, arguments, run))
            _report(steps[-1])
    if arguments.save:
        checkpoint.save(arguments.save, chunks, optimizer, arguments.steps, contract)
    return {"arguments": vars(arguments), "numerics": contract, "steps": steps}


def _wrap(config: Any, parts: list[torch.nn.Module], arguments: Any) -> list[torch.nn.Module]:
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=arguments.dtype == "fp32" or arguments.grad_dtype == "fp32",
        overlap_grad_reduce=arguments.overlap_grad_reduce,
        overlap_param_gather=arguments.overlap_param_gather,
        use_distributed_optimizer=arguments.distributed_optimizer,
        bucket_size=arguments.bucket_size,
        average_in_collective=arguments.average_in_collective,
    )
    chunks: list[torch.nn.Module] = []
    for index, part in enumerate(parts):
        # As Megatron's training does: only the first chunk's gathers and reductions are worth cutting into buckets.
        chunks.append(DistributedDataParallel(config, ddp_config, part, disable_bucketing=index > 0))
    for chunk in chunks:
        chunk.broadcast_params()
    return chunks


def _optimizer_config(arguments: Any) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=arguments.lr,
        min_lr=arguments.lr,
        weight_decay=0.01,
        bf16=arguments.dtype == "bf16",
        params_dtype=torch.bfloat16 if arguments.dtype == "bf16" else torch.float32,
        use_distributed_optimizer=arguments.distributed_optimizer,
        overlap_param_gather=arguments.overlap_param_gather,
        clip_grad=arguments.clip,
    )


def _step(
    step: int, learned: Tensor, chunks: list[Any], optimizer: Any, config: Any, arguments: Any, run: golden.Recorder
) -> dict[str, Any]:
    sharded = arguments.distributed_optimizer
    started = _now()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    per_rank = arguments.micro_batch * parallel_state.get_data_parallel_world_size()
    num_micro_batches, rest = divmod(arguments.global_batch, per_rank)
    if rest or not num_micro_batches:
        raise SystemExit(f"--global-batch {arguments.global_batch} is no multiple of {per_rank} samples")
    losses = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=[_batches(step, learned, num_micro_batches, arguments) for _ in chunks],
        model=chunks,
        num_microbatches=num_micro_batches,
        seq_length=arguments.sequence,
        micro_batch_size=arguments.micro_batch,
        forward_only=False,
    )
    seconds = _now() - started
    gradients = fingerprint.hash_of(fingerprint.gradients(chunks, sharded))
    if run.enabled:
        for name, gradient in fingerprint.gradients(chunks, sharded):
            run.add("gradients", name, gradient)
    started = _now()
    _, norm, _ = optimizer.step()
    seconds += _now() - started
    loss = _mean_loss(losses)
    weights = fingerprint.hash_of(fingerprint.weights(chunks, sharded))
    if run.enabled:
        for name, weight in fingerprint.weights(chunks, sharded):
            run.add("weights", name, weight)
        for name, state, begin in fingerprint.optimizer_state(chunks, optimizer):
            run.add("optimizer", name, state, offset=begin)
        run.step(step, loss=float.fromhex(loss))
    return {
        "loss": loss,
        "gradient_norm": None if norm is None else float(norm).hex(),
        "gradients": gradients,
        "weights": weights,
        "seconds": seconds,
    }


def _now() -> float:
    """When all work so far is done, on a GPU too."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _batches(step: int, learned: Tensor, num_micro_batches: int, arguments: Any) -> Iterator[dict[str, Tensor]]:
    """This rank's micro-batches of a step. Samples are dealt to data-parallel ranks in turn, as Megatron deals them."""
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    for index in range(num_micro_batches):
        first = step * arguments.global_batch + (index * size + rank) * arguments.micro_batch
        batch = text.micro_batch(learned, first, arguments.micro_batch, arguments.sequence, arguments.seed)
        yield {name: value.cuda() for name, value in batch.items()}


def _forward(batches: Iterator[dict[str, Tensor]], chunk: torch.nn.Module) -> tuple[Tensor, Any]:
    batch = next(batches)
    if (size := parallel_state.get_context_parallel_world_size()) > 1:
        batch = text.context_shard(batch, parallel_state.get_context_parallel_rank(), size)
    losses = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, _mean


def _mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    mean = losses.float().mean()
    # Megatron multiplies by the context-parallel size again: it expects this rank's part of the mean of a sequence.
    return mean / parallel_state.get_context_parallel_world_size(), {"loss": mean.detach()}


def _mean_loss(losses: list[dict[str, Tensor]]) -> str:
    """Over all samples of the step, as hexadecimal text; known to the last pipeline stage, told to all ranks."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    told: list[str | None] = [None] * dist.get_world_size()
    own = None
    if losses:
        mean = torch.stack([loss["loss"] for loss in losses]).sum() / len(losses)
        dist.all_reduce(mean, group=group)
        own = float(mean / group.size()).hex()
    dist.all_gather_object(told, own)
    return next(loss for loss in told if loss is not None)


def _report(step: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        loss, norm = float.fromhex(step["loss"]), float.fromhex(step["gradient_norm"] or "nan")
        print(
            f"step {step['step']:3d}  loss {loss:.6f}  norm {norm:.6f}  gradients {step['gradients'][:16]}  "
            f"weights {step['weights'][:16]}  {step['seconds']:.3f} s",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
