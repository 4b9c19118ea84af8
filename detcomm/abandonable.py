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
        self._errors: list[BaseException] = []
        self._has_failed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether the step has made something or raised."""
        return self._has_failed or bool(self._made)

    def take_error(self) -> BaseException | None:
        """What the step raised; to be asked once, since an error that is kept keeps all that its traceback names."""
        return self._errors.pop() if self._errors else None

    def take_or_abandon(self) -> list[T]:
        """What was made; empty if there is nothing yet, and then it will be closed as soon as it is made."""
        with self._ending:
            self._is_abandoned = not self._made
            return self._made

    def _run(self) -> None:
        try:
            made = self._step()
        except BaseException as error:  # whoever waits gets it
            self._errors.append(error)
            self._has_failed = True
        else:
            with self._ending:
                self._made.append(made)
                is_unwanted = self._is_abandoned
            if is_unwanted:
                self._close(made)
        self._changed.set()
