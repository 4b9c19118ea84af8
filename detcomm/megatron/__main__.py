# SPDX-License-Identifier: Apache-2.0
"""Runs a training script of Megatron on detcomm, unchanged.

    torchrun --nproc-per-node 8 -m detcomm.megatron --policy "pp,ep=stock" pretrain_gpt.py --num-layers 32 …

Options before the script are ours, everything behind it is the script's.
"""

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from detcomm.association import NAMES
from detcomm.errors import DetcommError, UsageError
from detcomm.megatron.guard import SETTINGS
from detcomm.megatron.startup import DEFAULT_TIMEOUT, initialize
from detcomm.megatron.step_switch import parse_steps
from detcomm.options import Options

_TIMEOUT_OPTION = "--distributed-timeout-minutes"


def main() -> None:
    """Initialise, then run the script as ``__main__``. An error of ours is one line and status 2, as in ``detcomm``."""
    settings = _parser().parse_args()
    try:
        _start(settings)
    except DetcommError as error:
        print(f"detcomm: {error}", file=sys.stderr)
        sys.exit(2)
    _run(settings)


def _start(settings: argparse.Namespace) -> None:
    if not settings.module and not Path(settings.script).exists():
        raise UsageError(f"script: expected a file, got {settings.script}, which does not exist")
    overrides = {
        name: value for name in ("association", "accumulate", "schedule") if (value := getattr(settings, name))
    }
    initialize(
        policy=settings.policy,
        options=Options.from_environment(**overrides),
        deterministic_kernels=not settings.allow_nondeterministic_kernels,
        exact_grad_norm=settings.exact_grad_norm,
        steps=None if settings.steps is None else parse_steps(settings.steps),
        allow=tuple(filter(None, (settings.allow or "").split(","))),
        force_resume=settings.force_resume,
        timeout=_timeout(settings.arguments),
    )


def _run(settings: argparse.Namespace) -> None:
    sys.argv[:] = [settings.script, *settings.arguments]
    if settings.module:
        sys.path[0] = os.getcwd()
        runpy.run_module(settings.script, run_name="__main__", alter_sys=True)
        return
    # As `python script.py` has it: the script's own folder stands first.
    sys.path[0] = str(Path(settings.script).resolve().parent)
    runpy.run_path(settings.script, run_name="__main__")


def _timeout(arguments: Sequence[str]) -> timedelta:
    """Megatron's own option, since it makes the group of all ranks no longer itself."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(_TIMEOUT_OPTION, type=float, dest="minutes")
    minutes = parser.parse_known_args(arguments)[0].minutes
    return DEFAULT_TIMEOUT if minutes is None else timedelta(minutes=minutes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m detcomm.megatron",
        description="Run a training script of Megatron with fixed-order collectives, under torchrun, mpirun or srun.",
        allow_abbrev=False,
    )
    parser.add_argument("--policy", help='which groups are fixed-order: "dp,tp=fixed; pp,ep=stock"; default: all')
    parser.add_argument("--association", choices=NAMES, help="the order of additions; default: tree")
    parser.add_argument("--accumulate", choices=("float32", "wire"), help="precision of sums of 16-bit types")
    parser.add_argument("--schedule", help="speed only; default: auto")
    parser.add_argument(
        "--allow-nondeterministic-kernels",
        action="store_true",
        help="leave cuBLAS, TransformerEngine and torch as they are: only communication is fixed-order",
    )
    parser.add_argument(
        "--exact-grad-norm", action="store_true", help="a gradient norm that is the same for every bucket size"
    )
    parser.add_argument("--steps", help="fixed order for these steps alone, as 1000:1100; stock for the others")
    parser.add_argument("--allow", help=f"go on where the guard refuses, comma-separated: {', '.join(SETTINGS)}")
    parser.add_argument("--force-resume", action="store_true", help="go on from a checkpoint with other numerics")
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    return parser


if __name__ == "__main__":
    main()
