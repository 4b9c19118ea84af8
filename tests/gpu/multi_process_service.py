# SPDX-License-Identifier: Apache-2.0
"""CUDA's multi-process service, for as long as ranks share GPUs; without it they take turns, and calls take long."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

_PATIENCE_S = 30


@contextlib.contextmanager
def started(shares: bool) -> Iterator[None]:
    """Start it if ranks share GPUs and nobody has started it; say so where there is none. Before CUDA is started."""
    command = shutil.which("nvidia-cuda-mps-control")
    if not shares or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield
        return
    if command is None:
        print("no nvidia-cuda-mps-control: ranks take turns on the GPU, and times mean nothing", flush=True)
        yield
        return
    with tempfile.TemporaryDirectory() as pipes, tempfile.TemporaryDirectory() as logs:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_MPS_LOG_DIRECTORY": logs}
        subprocess.run([command, "-d"], check=True, timeout=_PATIENCE_S)
        try:
            yield
        finally:
            subprocess.run([command], input="quit\n", text=True, check=False, timeout=_PATIENCE_S)
