# SPDX-License-Identifier: Apache-2.0
"""Several ranks on one GPU: what NCCL must be told in their environment, since it refuses them otherwise.

Each rank passes for a host of its own, and bytes travel over loopback sockets. So bits are what they are everywhere,
orders and counts too; times are good for ratios alone, and only with CUDA's multi-process service: without it ranks
take turns on the GPU. For checks and tools on machines with few GPUs; a training has a GPU for each rank.

Knows neither torch nor CUDA: who asks has counted the GPUs.
"""

import os

_VARIABLES = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "DETCOMM_NODE_SIZE": "1",  # what NCCL takes for hosts, plans shall too
}


def variables(rank: int) -> dict[str, str]:
    """For a rank's environment, before its first call of NCCL."""
    return {**_VARIABLES, "NCCL_HOSTID": f"host{rank}"}


def share(rank: int, num_ranks: int, num_gpus: int) -> bool:
    """Set them in this process if its machine's ranks are more than its GPUs; whether they are.

    Args:
        rank: of this process.
        num_ranks: on this machine.
        num_gpus: on this machine.
    """
    shares = num_ranks > num_gpus
    if shares:
        for name, value in variables(rank).items():
            os.environ.setdefault(name, value)
    return shares
