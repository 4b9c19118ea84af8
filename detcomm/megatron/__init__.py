# SPDX-License-Identifier: Apache-2.0
"""Megatron Core on detcomm: every group routed, without editing Megatron.

    import detcomm.megatron
    detcomm.megatron.initialize()                    # first in the training script, or:

    torchrun … -m detcomm.megatron pretrain_gpt.py   # Megatron's own arguments follow

Importing this package imports nothing of Megatron.
"""

from detcomm.megatron.policy import Policy, Rule
from detcomm.megatron.startup import Start, initialize

__all__ = ["Policy", "Rule", "Start", "initialize"]
