# SPDX-License-Identifier: Apache-2.0
"""``detcomm verify``, ``probe`` and ``bench`` with ``--device cuda``, as a user calls them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SCOPE = ("--quick", "--dtypes", "float32,bfloat16", "--ops", "sum,avg,max")
VERIFY = (
    (0, ("verify", *SCOPE)),
    (1, ("verify", "--backend", "nccl", *SCOPE)),
)
PROBE = (
    (0, ("probe", "--sizes", "1000,100000")),
    (0, ("probe", "--backend", "nccl", "--sizes", "1000,100000", "--dtypes", "float32,bfloat16")),
)
BENCH = (
    (0, ("bench", "--sizes", "4K,1M,16M", "-d", "bfloat16", "--place", "in", "-n", "40", "--rounds", "5")),
    (0, ("bench", "train", "--params", "100M", "-d", "bfloat16", "-n", "10", "--rounds", "5")),
)
"""What is called, and the exit code that it must have: stock NCCL does not hold what is verified."""


def run(calls: tuple[tuple[int, tuple[str, ...]], ...], num_ranks: int, patience_s: float) -> list[str]:
    """The lines that the commands print."""
    lines = []
    for code, arguments in calls:
        command = [sys.executable, "-m", "detcomm", *arguments, "--device", "cuda", "--nproc", str(num_ranks)]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience_s)
        except subprocess.TimeoutExpired as late:
            so_far = bytes(late.stdout or b"").decode()[-4000:]
            raise AssertionError(f"not done in {patience_s:g} s: {' '.join(command[2:])}\n{so_far}") from None
        told = done.stdout.splitlines()
        assert done.returncode == code, "\n".join([f"exit code {done.returncode}", *told[-20:], done.stderr[-3000:]])
        lines += [f"$ detcomm {' '.join(command[3:])}", *told]
    return lines
