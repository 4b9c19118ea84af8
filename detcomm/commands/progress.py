# SPDX-License-Identifier: Apache-2.0
"""How far a command is, on stderr: a line that changes on a terminal, now and then one in a log. Knows no command."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

EVERY_S = 10.0
"""Between two lines in a log; what takes less time says nothing there."""

Say = Callable[[str], None]


@contextmanager
def progress(speaks: bool, what: str) -> Iterator[Say]:
    """While something goes on: called with what comes next, as often as one likes.

    Args:
        speaks: whether this rank is the one that tells.
        what: goes on.
    """
    console = Console(stderr=True)
    if not speaks:
        yield lambda _: None
    elif console.is_terminal:
        with console.status(what) as status:
            yield lambda text: status.update(f"{what}: {text}")
    else:
        yield _logged(what)


def _logged(what: str) -> Say:
    next_at = time.monotonic() + EVERY_S

    def say(text: str) -> None:
        nonlocal next_at
        if time.monotonic() >= next_at:
            next_at = time.monotonic() + EVERY_S
            print(f"{what}: {text}", file=sys.stderr, flush=True)

    return say
