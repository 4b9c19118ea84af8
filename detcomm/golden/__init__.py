# SPDX-License-Identifier: Apache-2.0
"""Golden runs: what a training run computed, step by step, as hashes in a small file that another run is checked with.

    with detcomm.golden.Recorder("run.golden") as run:
        for step in range(num_steps):
            ...
            optimizer.step()
            run.step(step, loss=loss, model=model, optimizer=optimizer)

``detcomm golden check REF RUN`` compares two files. What a digest is: ``docs/golden.md``.
"""

from typing import TYPE_CHECKING, Any

from detcomm.golden.digest import Digest, digest
from detcomm.golden.positions import Grid

if TYPE_CHECKING:
    from detcomm.golden.record import Recorder

__all__ = ["Digest", "Grid", "Recorder", "digest"]


def __getattr__(name: str) -> Any:
    """The recorder when it is asked for: it needs torch's DTensor, whose import takes a second."""
    if name == "Recorder":
        from detcomm.golden.record import Recorder

        return Recorder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
