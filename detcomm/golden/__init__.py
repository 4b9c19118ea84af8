# SPDX-License-Identifier: Apache-2.0
"""Golden runs: what a training run computed, step by step, as hashes in a small file that another run is checked with.

    with detcomm.golden.Recorder("run.golden") as run:
        for step in range(num_steps):
            ...
            optimizer.step()
            run.step(step, loss=loss, model=model, optimizer=optimizer)

``detcomm golden check REF RUN`` compares two files. What a digest is: ``docs/golden.md``.
"""

from importlib.util import find_spec

from detcomm.golden.digest import Digest, digest
from detcomm.golden.positions import Grid

__all__ = ["Digest", "Grid", "digest"]

if find_spec("torch") is not None:
    from detcomm.golden.record import Recorder as Recorder
