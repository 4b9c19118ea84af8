# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``train.py``. Data parallelism takes what the other sizes leave of the world."""

import argparse
from collections.abc import Sequence


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments, from the command line by default."""
    parser = argparse.ArgumentParser(
        prog="train.py", description="Trains a small GPT of Megatron Core and prints hashes of gradients and weights."
    )
    _parallelism(parser.add_argument_group("parallelism"))
    _reduction(parser.add_argument_group("reduction of gradients"))
    _training(parser.add_argument_group("model and training"))
    _files(parser.add_argument_group("files"))
    arguments = parser.parse_args(argv)
    if arguments.sp and arguments.tp == 1:
        parser.error("--sp splits sequences over the tensor-parallel ranks: it needs --tp above 1")
    if arguments.vpp and arguments.pp == 1:
        parser.error("--vpp needs --pp above 1")
    if arguments.ep > 1 and not arguments.num_experts:
        parser.error("--ep needs --num-experts")
    if arguments.exact_norm and arguments.backend != "detcomm":
        parser.error("--exact-norm is detcomm's")
    if arguments.overlap_param_gather and not (arguments.distributed_optimizer and arguments.overlap_grad_reduce):
        parser.error("--overlap-param-gather needs --distributed-optimizer and --overlap-grad-reduce")
    return arguments


def _parallelism(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    group.add_argument("--sp", action="store_true", help="sequence parallelism over the tensor-parallel ranks")
    group.add_argument("--pp", type=int, default=1, help="pipeline-parallel size")
    group.add_argument("--vpp", type=int, help="virtual stages on each pipeline rank")
    group.add_argument("--cp", type=int, default=1, help="context-parallel size; needs TransformerEngine")
    group.add_argument("--ep", type=int, default=1, help="expert-parallel size")
    group.add_argument("--num-experts", type=int, help="experts of each mixture-of-experts layer; default: dense")
    group.add_argument("--dispatcher", choices=("alltoall", "allgather"), default="alltoall")


def _reduction(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--backend", choices=("detcomm", "gloo", "nccl"), default="detcomm")
    group.add_argument("--distributed-optimizer", action="store_true", help="shard the optimizer over data parallelism")
    group.add_argument("--overlap-grad-reduce", action="store_true", help="reduce buckets during the backward pass")
    group.add_argument("--overlap-param-gather", action="store_true", help="gather parameters during the forward pass")
    group.add_argument("--bucket-size", type=int, help="parameters of one bucket; default: one bucket")
    group.add_argument("--grad-dtype", choices=("fp32", "bf16"), default="fp32", help="for --dtype bf16")
    group.add_argument("--average-in-collective", action="store_true", help="AVG instead of a division before SUM")
    group.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient; 0: no clipping")
    group.add_argument("--exact-norm", action="store_true", help="the norm summed exactly: free of shards' borders")


def _training(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--layers", type=int, default=4)
    group.add_argument("--hidden", type=int, default=64)
    group.add_argument("--heads", type=int, default=4)
    group.add_argument("--sequence", type=int, default=32, help="bytes of one sample")
    group.add_argument("--untied", action="store_true", help="an output layer of its own, not the embedding's weights")
    group.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    group.add_argument("--steps", type=int, default=3, help="up to which step to train")
    group.add_argument("--micro-batch", type=int, default=1, help="samples of one micro-batch")
    group.add_argument("--global-batch", type=int, default=16, help="samples of one step, over all ranks")
    group.add_argument("--lr", type=float, default=1e-3)
    group.add_argument("--seed", type=int, default=1234)


def _files(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--text", help="a file to learn; default: the source code of Python's standard library")
    group.add_argument("--save", help="folder of the checkpoint that is written after the last step")
    group.add_argument("--load", help="folder of a checkpoint to go on from")
    group.add_argument("--force-load", action="store_true", help="go on even under another order of additions")
    group.add_argument("--golden", help="record a golden run into this file: see docs/golden.md")
    group.add_argument("--out", help="file for the hashes, losses and times, as JSON")
