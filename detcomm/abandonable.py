# SPDX-License-Identifier: Apache-2.0
"""A step that waits where nobody can wake it, in a thread of its own that can be left behind.

Gloo's constructor is such a place, and the store. Knows nothing of what is made.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Abandonable(Generic[T]):
    """The step, started.

    Args:
        name: of the thread.
        step: makes something.
        close: releases what the step made, if it ends after all when nobody wants it any more.
        changed: set when the step has ended.
    """

    def __init__(self, name: str, step: Callable[[], T], close: Callable[[T], None], changed: threading.Event) -> None:
        self._step, self._close, self._changed = step, close, changed
        self._made: list[T] = []
        self._ending = threading.Lock()
        self._is_abandoned = False
        self.error: BaseException | None = None
        """What the step raised."""
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether the step has made something or raised."""
        return bool(self._made) or self.error is not None

    def take_or_abandon(self) -> list[T]:
        """What was made; empty if there is nothing yet, and then it will be closed as soon as it is made."""
        with self._ending:
            self._is_abandoned = not self._made
            return self._made

    def _run(self) -> None:
        try:
            made = self._step()
        except BaseException as error:  # whoever waits gets it
            self.error = error
        else:
            with self._ending:
                self._made.append(made)
                is_unwanted = self._is_abandoned
            if is_unwanted:
                self._close(made)
        self._changed.set()
