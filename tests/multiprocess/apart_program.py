# SPDX-License-Identifier: Apache-2.0
"""What ``test_shared_memory_limits.py`` starts in namespaces of its own: a rank that reduces and says what it saw.

Usage: ``apart_program.py [full]``; with ``full``, /dev/shm must have no room for what is reduced. Prints one line of
JSON: the transport's name, the sum's first element, the warnings, the error.
"""

import errno
import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import detcomm  # noqa: F401 (registers the backend)

COUNT = 1 << 20
_LIMIT = timedelta(seconds=120)


def _has_room() -> bool:
    path = Path("/dev/shm/detcomm-test")
    try:
        path.write_bytes(bytes(4 * COUNT))
        return True
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    finally:
        path.unlink(missing_ok=True)


def main(is_full: bool) -> None:
    """Reduce once, and once more in the same group."""
    said: dict[str, Any] = {"transport": "", "first": 0.0, "error": ""}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False, _LIMIT, wait_for_workers=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not (is_full and _has_room())
        dist.init_process_group("detcomm", store=store, rank=rank, world_size=world_size, timeout=_LIMIT)
        try:
            for _ in range(2):
                tensor = torch.full((COUNT,), float(2**rank))
                dist.all_reduce(tensor)
                said["first"] = tensor[0].item()
            said["transport"] = dist.group.WORLD._group._communicator.made.transport.name
        except RuntimeError as error:
            said["error"] = f"{type(error).__name__}: {error}"
    said["warnings"] = [str(one.message) for one in caught if "falling back" in str(one.message)]
    dist.destroy_process_group()
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main("full" in sys.argv[1:])
