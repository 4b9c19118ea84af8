# SPDX-License-Identifier: Apache-2.0
"""One thread that looks after what runs on the GPUs of this process: lets go of what is done, sees what never will be.

Nobody else would: a caller does not wait for the GPU, and a stream that waits for a lost peer says nothing.
Dead processes are found by ``detcomm.watch``, sooner than any timeout.
"""

import threading
from collections.abc import Callable
from typing import ClassVar

from detcomm.cuda.communicator import CudaCommunicator
from detcomm.errors import TransportError

_POLL_S = 0.05

OnError = Callable[[TransportError], None]


class CudaWatch:
    """The thread, while there is a communicator to look after."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _watched: ClassVar[dict[CudaCommunicator, OnError]] = {}
    _thread: ClassVar[threading.Thread | None] = None
    _changed: ClassVar[threading.Event] = threading.Event()

    @classmethod
    def add(cls, communicator: CudaCommunicator, on_error: OnError) -> None:
        """Look after a communicator. ``on_error`` is called once, from the thread."""
        with cls._lock:
            cls._watched[communicator] = on_error
            if cls._thread is None:
                cls._changed = threading.Event()
                cls._thread = threading.Thread(target=cls._loop, args=(cls._changed,), name="detcomm-cuda", daemon=True)
                cls._thread.start()

    @classmethod
    def remove(cls, communicator: CudaCommunicator) -> None:
        """Stop to look after it. The thread ends with the last one."""
        with cls._lock:
            cls._watched.pop(communicator, None)
            if not cls._watched:
                cls._changed.set()
                cls._thread = None

    @classmethod
    def _loop(cls, ended: threading.Event) -> None:
        while not ended.wait(_POLL_S):
            with cls._lock:
                watched = list(cls._watched.items())
            for communicator, on_error in watched:
                try:
                    communicator.poll()
                except Exception as error:
                    cls.remove(communicator)
                    on_error(error if isinstance(error, TransportError) else TransportError(f"{error!r}"))
