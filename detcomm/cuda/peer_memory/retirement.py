# SPDX-License-Identifier: Apache-2.0
"""The end of memory that peers may have mapped: freed when all of them have said that they have let go.

Nobody waits long for that word. A driver's unmapping waits for every kernel on its device, and one of them may wait for
a rank that waits here: so after a short patience the memory is left, and freed when this process comes by again.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from detcomm import store_access
from detcomm.cuda.peer_memory.meeting import Meeting
from detcomm.errors import NativeError

PATIENCE_S = 2.0
"""For peers that come to the same end at about the same time."""


class _Retired(NamedTuple):
    meeting: Meeting
    keys: Sequence[str]
    free: Callable[[], None]


_waiting: list[_Retired] = []
_failed: list[_Retired] = []
"""What the driver would not free: the device has failed, and whoever uses it is told there."""

_changing = threading.Lock()


def retire(meeting: Meeting, free: Callable[[], None], patience_s: float = PATIENCE_S) -> bool:
    """Nothing of the peers' is mapped here any more; free what they had mapped as soon as that may be.

    All ranks of the block call this, in the same order among their rounds.

    Returns:
        Whether it is freed; else ``reclaim`` will, or the end of the process.
    """
    meeting.num_retired += 1
    keys = [f"retired/{meeting.num_retired}/{rank}" for rank in meeting.ranks]
    retired = _Retired(meeting, keys, free)
    try:
        meeting.store.set(keys[meeting.index], "")
        is_free = _all_have_let_go(retired, patience_s)
    except RuntimeError:  # what every error of torch's stores is: its server has ended, and so have peers
        is_free = False
    if is_free:
        free()
    else:
        with _changing:
            _waiting.append(retired)
    return is_free


def reclaim() -> None:
    """Free what had to be left, where all peers have let go by now. Waits for no peer."""
    with _changing:
        for retired in _waiting[:]:
            try:
                if not _all_have_let_go(retired, 0.0):
                    continue
                _waiting.remove(retired)
                retired.free()
            except NativeError:
                _failed.append(retired)
            except RuntimeError:  # the store's: its server has ended, and nobody will say any more
                _waiting.remove(retired)
                _failed.append(retired)


def _all_have_let_go(retired: _Retired, patience_s: float) -> bool:
    meeting = retired.meeting
    return None not in store_access.read_all(meeting.store, retired.keys, patience_s, meeting.has_failed)
