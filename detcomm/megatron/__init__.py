# SPDX-License-Identifier: Apache-2.0
"""Megatron Core on detcomm: every group routed, without editing Megatron.

    import detcomm.megatron
    detcomm.megatron.initialize()                    # first in the training script, or:

    torchrun … -m detcomm.megatron pretrain_gpt.py   # Megatron's own arguments follow

Importing this package imports nothing of Megatron.
"""

from detcomm.megatron.checkpoint import check_checkpoint_state, checkpoint_state
from detcomm.megatron.gradient_norm import exact_grad_norm
from detcomm.megatron.group_report import Report, report
from detcomm.megatron.guard import check
from detcomm.megatron.job import Job
from detcomm.megatron.policy import Policy, Rule
from detcomm.megatron.startup import initialize

__all__ = [
    "Job",
    "Policy",
    "Report",
    "Rule",
    "check",
    "check_checkpoint_state",
    "checkpoint_state",
    "exact_grad_norm",
    "initialize",
    "report",
]
