# SPDX-License-Identifier: Apache-2.0
"""A small DDP training loop with a golden run: the three lines that have to do with it are marked.

    detcomm golden record --out ref.golden -- torchrun --nproc-per-node 3 examples/golden/train.py
    detcomm golden record --out run.golden -- torchrun --nproc-per-node 3 examples/golden/train.py --bucket-mb 0.001
    detcomm golden check ref.golden run.golden

With detcomm the two files are equal; with ``--backend gloo`` the bucket size shows in the bits from the second step on.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from detcomm.golden import Recorder  # golden run; importing detcomm registers the backend

BATCH = 16


def main() -> None:
    """Train a classifier of noisy points on the spiral arm where they lie."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--backend", default="detcomm")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(arguments.backend)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    model = DistributedDataParallel(layers, bucket_cap_mb=arguments.bucket_mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    draw = torch.Generator().manual_seed(1000 + dist.get_rank())
    config = {"seed": 0, "batch": BATCH}
    with Recorder(config=config) as run:  # golden run
        for step in range(arguments.steps):
            arms = torch.randint(3, (BATCH,), generator=draw)
            radius = torch.rand(BATCH, generator=draw)
            angle = 5 * radius + 2.1 * arms + 0.2 * torch.randn(BATCH, generator=draw)
            points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(points), arms)
            loss.backward()
            optimizer.step()
            run.step(step, loss=loss, model=model, optimizer=optimizer)  # golden run
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
