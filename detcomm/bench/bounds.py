# SPDX-License-Identifier: Apache-2.0
"""What the machine itself allows: how fast its cores copy together, how soon a process is woken, and least times.

The least that a collective must do is read every rank's input and write every rank's output once, whoever does it; all
cores together copy no faster than they do with nothing else to do. Knows nothing of detcomm's transports.
"""

import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_ROUNDS = 9
_PINGS = 2000
_COPIED_BYTES = (64 << 10, 1 << 20, 64 << 20)
_TURN_BYTES = 64 << 20
_HALF_PAGE = 2048
_ECHO = "import os\nwhile os.read(0, 1): os.write(1, b'.')"


@dataclass(frozen=True)
class Bounds:
    """Of one machine.

    Args:
        cores: that copied at the same time.
        copy_gbps: 1e9 bytes a second, read and written bytes both counted, by the bytes of what each core copies.
        wake_us: from one process to another that sleeps, through a pipe.
    """

    cores: int
    copy_gbps: dict[int, float]
    wake_us: float

    def least_us(self, collective: str, num_bytes: int, world_size: int) -> float:
        """The least time of a collective on private memory, in microseconds; ``num_bytes`` as in ``Case``."""
        whole, all_of_them = num_bytes, num_bytes * world_size
        moved = 2 * all_of_them if collective == "all_reduce" else whole + all_of_them
        copied = max([size for size in self.copy_gbps if size <= num_bytes], default=min(self.copy_gbps))
        return moved / self.copy_gbps[copied] / 1e3

    def to_json(self) -> dict[str, Any]:
        """The bounds as plain data."""
        return asdict(self)


def measure_bounds() -> Bounds:
    """Measure this machine, in a few seconds; it should have nothing else to do."""
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores) as pool:
        copy_gbps = {size: round(_copy_gbps(pool, cores, size), 1) for size in _COPIED_BYTES}
    return Bounds(cores, copy_gbps, round(_wake_us(), 1))


def _copy_gbps(pool: ThreadPoolExecutor, cores: int, num_bytes: int) -> float:
    """All cores copy buffers of their own; the median round."""
    repeats = _TURN_BYTES // num_bytes
    # Half a page apart: some processors copy slowly between addresses that lie alike in their pages.
    buffers = [np.ones(2 * num_bytes + _HALF_PAGE, np.uint8) for _ in range(cores)]

    def copy(buffer: Any) -> None:
        for _ in range(repeats):
            np.copyto(buffer[-num_bytes:], buffer[:num_bytes])  # releases the GIL

    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        list(pool.map(copy, buffers))
        seconds.append(time.perf_counter() - start)
    return 2 * num_bytes * repeats * cores / statistics.median(seconds) / 1e9


def _wake_us() -> float:
    """Half of a round trip to a process that sleeps in a read."""
    echo = subprocess.Popen(
        [sys.executable, "-S", "-c", _ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert echo.stdin is not None
    assert echo.stdout is not None
    there, back = echo.stdin.fileno(), echo.stdout.fileno()
    seconds = []
    try:
        for _ in range(_PINGS):
            start = time.perf_counter()
            os.write(there, b".")
            os.read(back, 1)
            seconds.append(time.perf_counter() - start)
    finally:
        echo.stdin.close()
        echo.stdout.close()
        echo.wait(10)
    return statistics.median(seconds) / 2 * 1e6
