# SPDX-License-Identifier: Apache-2.0
"""One call before Megatron: the process group of all ranks, and what must be in place when Megatron makes its own.

Megatron leaves ``torch.distributed`` as it is where it has been initialised already, and its groups then take what
they find. Nothing of Megatron is imported here.
"""

import os
import warnings
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from detcomm.errors import UsageError
from detcomm.megatron import (
    checkpoint,
    environment,
    exit_signal,
    gradient_norm,
    guard,
    job,
    routing,
    step_switch,
    switched_group,
)
from detcomm.megatron.inventory import WORLD
from detcomm.megatron.job import Job
from detcomm.megatron.policy import VARIABLE, Policy
from detcomm.megatron.replacements import Replacements
from detcomm.megatron.routing import RoutedGroup, Router
from detcomm.megatron.step_switch import StepSwitch
from detcomm.options import Options

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""Megatron's own default of ``--distributed-timeout-minutes``."""

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def initialize(
    *,
    policy: Policy | str | None = None,
    options: Options | None = None,
    deterministic_kernels: bool = True,
    exact_grad_norm: bool = False,
    steps: range | None = None,
    allow: Iterable[str] = (),
    force_resume: bool = False,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> Job:
    """Initialise ``torch.distributed`` for a training with Megatron; call it first in the script, on every rank.

    On a machine with CUDA the groups are ``"cpu:gloo,cuda:detcomm"``, elsewhere ``"detcomm"``. Ranks are found in the
    variables of torchrun, Open MPI, MPICH or SLURM.

    Args:
        policy: which groups are fixed-order, a value or its text; default: ``DETCOMM_MEGATRON_POLICY``, else all.
        options: of fixed-order groups; default: those of the environment.
        deterministic_kernels: also require what Megatron's ``--deterministic-mode`` requires of the environment, and
            ``torch.use_deterministic_algorithms(True)``. Without it, equal sums of unequal summands are unequal.
        exact_grad_norm: let ``gradient_norm`` compute Megatron's gradient norm, so that it is the same for all bucket
            sizes, with the distributed optimizer too.
        steps: be in fixed order for these steps alone, and stock for the others; see ``Job.at_step``.
        allow: settings that ``guard.check`` only warns of, when Megatron's training loop checks its arguments.
        force_resume: warn of a checkpoint with other numerics instead of refusing it, in Megatron's training loop.
        timeout: of the group of all ranks; Megatron gives its own groups its own.

    Raises:
        UsageError: called twice or too late, not under a launcher, or the environment contradicts. Nothing is left.
        DetcommError: the ranks do not come together.
    """
    if job.is_running() or dist.is_initialized():
        raise UsageError("initialize: torch.distributed has been initialised before; call this first")
    absent = [name for name in LAUNCH_VARIABLES if name not in os.environ]
    if absent:
        raise UsageError(f"initialize: {', '.join(absent)} not set; start the script by torchrun, mpirun or srun")
    if policy is None:
        policy = os.environ.get(VARIABLE, "")
    policy = Policy.parse(policy) if isinstance(policy, str) else policy
    options = Options.from_environment() if options is None else options
    guard.check(allow=allow)  # its names alone, so far
    environment_set = environment.require_deterministic_kernels(os.environ) if deterministic_kernels else ()
    if torch.cuda.is_available():
        torch.cuda.set_device(_device())
    if steps is not None:
        switched_group.register()
    router = Router(policy, options, switched=steps is not None)
    backend, world_options = router.backend_and_options(policy.choose(WORLD))
    with warnings.catch_warnings():
        # torch warns of every process group subclass; there is nothing that a user could do.
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        dist.init_process_group(backend, timeout=timeout, pg_options=world_options)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    router.record(RoutedGroup(WORLD, tuple(range(world_size)), backend, world_options, dist.group.WORLD))
    replacements = Replacements()
    started = Job(
        backend,
        policy,
        options,
        rank,
        world_size,
        environment_set,
        exact_grad_norm,
        None if steps is None else StepSwitch(steps, router.switched_groups),
        router,
        replacements,
    )
    job.run(started)
    replacements.add(routing.MODULE, routing.FUNCTION, router.replacing)
    replacements.add(exit_signal.MODULE, exit_signal.FUNCTION, exit_signal.replacing)
    replacements.add(guard.MODULE, guard.FUNCTION, guard.replacing(tuple(allow), exact_grad_norm, steps is not None))
    replacements.add(checkpoint.MODULE, checkpoint.SAVING, checkpoint.saving)
    replacements.add(checkpoint.MODULE, checkpoint.LOADING, checkpoint.loading(force_resume))
    if started.switch is not None:
        replacements.add(step_switch.MODULE, step_switch.FUNCTION, step_switch.replacing(started.switch))
    if exact_grad_norm:
        replacements.add(gradient_norm.MODULE, gradient_norm.FUNCTION, gradient_norm.replacing)
    return started


def _device() -> int:
    """The GPU of this rank: the only one that it sees, or the one of its number on this host."""
    num_devices = torch.cuda.device_count()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if num_devices == 1:
        return 0
    if local_rank >= num_devices:
        raise UsageError(f"initialize: LOCAL_RANK is {local_rank}, and this host shows {num_devices} GPUs")
    return local_rank
