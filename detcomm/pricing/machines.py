# SPDX-License-Identifier: Apache-2.0
"""The numbers of a machine, as values. Each says where it comes from; "assumed" where nobody has measured it for us.

Add a machine by adding a value. Bandwidths are those that software reaches, in 10^9 bytes per second and direction.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """One kind of cluster.

    Attributes:
        node_size: ranks that share a host.
        local_gb_per_s: between two ranks of a host, per rank and direction.
        network_gb_per_s: of the network port of one rank, per direction.
        fold_gb_per_s: bytes read and written by a fold, per second.
        local_latency_us, network_latency_us: of one message, from one rank's memory to another's.
        launch_us: to start one step on the device, exchange and fold.
        message_us: to post one more message in the same step.
        small_latency_us: the same two latencies in NCCL's low-latency protocol, and its start-up cost; for its ring.
        call_us: once a call, whatever its steps. Part of ``launch_us`` on a GPU, whose host runs ahead.
    """

    name: str
    node_size: int
    local_gb_per_s: float
    network_gb_per_s: float
    fold_gb_per_s: float
    local_latency_us: float
    network_latency_us: float
    launch_us: float
    message_us: float
    small_latency_us: tuple[float, float, float]
    call_us: float = 0.0


# Latencies of both: NCCL's tuning table for Hopper (src/graph/tuning.cc, ring, Simple and LL): 3.4 and 14 us a step
# and 8.4 us to begin; in the low-latency protocol 0.6, 2.7 and 6.6 us, at a quarter of the bandwidth.
# NVLink 4: 450 GB/s a direction; NCCL's maintainers give about 370 after protocol overhead.
# Network: ConnectX-7 at 400 Gb/s a GPU is 50 GB/s; 48 after headers, assumed.
# One more message of a step: 0.5 us of NCCL's proxy thread, assumed.
_H200_IB = Machine(
    name="h200-ib",
    node_size=8,
    local_gb_per_s=370.0,
    network_gb_per_s=48.0,
    fold_gb_per_s=4000.0,  # measured: 3.8 to 4.1 TB/s for folds of 2 to 8 operands in bfloat16
    local_latency_us=3.4,
    network_latency_us=14.0,
    launch_us=8.4,
    message_us=0.5,
    small_latency_us=(0.6, 2.7, 6.6),
)
_H100_IB = Machine(
    name="h100-ib",
    node_size=8,
    local_gb_per_s=370.0,
    network_gb_per_s=48.0,
    fold_gb_per_s=2800.0,  # assumed: the H200's figure by the ratio of the memories' bandwidths, 3.35 to 4.8 TB/s
    local_latency_us=3.4,
    network_latency_us=14.0,
    launch_us=8.4,
    message_us=0.5,
    small_latency_us=(0.6, 2.7, 6.6),
)

MACHINES = {machine.name: machine for machine in (_H200_IB, _H100_IB)}
