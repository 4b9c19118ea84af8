# SPDX-License-Identifier: Apache-2.0
"""After a timeout: which call each rank is at, told through the store. A difference is named, and who says nothing.

Only a rank that has lost patience itself writes: one that waits for nothing is silent.
"""

import time
from typing import Any

_PATIENCE_S = 5.0
"""How long a rank that lost patience waits for others to lose it, who came to their calls later than it did."""


def compare_records(store: Any, rank: int, world_size: int, own: str) -> str:
    """Write down what this rank is at, and read what the others wrote.

    Args:
        store: a key space of the group.
        own: this rank's record.

    Returns:
        Ranks by record, for people; a mismatch of calls is called one.
    """
    try:
        return _compare(store, rank, world_size, own)
    except RuntimeError as error:  # the store may be gone with whoever is missing
        return f"the other ranks' records cannot be read: {error}"


def _compare(store: Any, rank: int, world_size: int, own: str) -> str:
    keys = [f"records/{other}" for other in range(world_size)]
    deadline = time.monotonic() + _PATIENCE_S
    store.set(keys[rank], own)
    while time.monotonic() < deadline and not store.check(keys):
        time.sleep(0.02)
    records = [store.get(key).decode() if store.check([key]) else None for key in keys]
    silent = [str(other) for other, text in enumerate(records) if text is None]
    told: dict[str, list[str]] = {}
    for other, text in enumerate(records):
        if text is not None:
            told.setdefault(text, []).append(str(other))
    parts = [f"rank {', '.join(ranks)} at {text}" for text, ranks in told.items()]
    if silent:
        parts.append(f"rank {', '.join(silent)} has lost no patience: it may not have made this call")
    verdict = "the ranks' calls do not match: " if len(told) > 1 else ""
    return verdict + "; ".join(parts)
