# SPDX-License-Identifier: Apache-2.0
"""What a schedule costs on a machine that is not here: an alpha-beta model, for worlds of any size.

    machines.py     the numbers of a machine, each with its source
    loads.py        what each step of a schedule asks of the busiest rank
    model.py        from loads to time, and NCCL's ring to compare with
    fitting.py      the numbers of the machine at hand, from times that were measured on it
    measured.py     the model against measured times
    large_worlds.py why a schedule of thousands of ranks is right, without running it as a whole

Every answer is an estimate. Bits never depend on one.
"""

from detcomm.pricing.machines import MACHINES, Machine
from detcomm.pricing.model import Price, candidates, price, ring_price

__all__ = ["MACHINES", "Machine", "Price", "candidates", "price", "ring_price"]
