# SPDX-License-Identifier: Apache-2.0
"""The order of a group's calls: one at a time, in the order in which they were made.

A synchronous call on an idle group runs on the caller's own thread, since handing over costs 60 us; everything else
queues for the group's thread, which is started at the first call that needs it. Knows nothing of what a job does.
"""

import queue
import threading
from collections.abc import Callable
from threading import get_ident

from detcomm.errors import UsageError

Job = Callable[[], None]


class Worker:
    """Runs the jobs of one group."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._turn = threading.Lock()
        self._owner: int | None = None
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._num_pending = 0
        self._stopped = False
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or runs on the group's thread."""
        return self._num_pending == 0

    @property
    def nested(self) -> bool:
        """Whether this thread is inside a job: then waiting for a queued one would never end."""
        return self._owner == get_ident()

    def try_begin(self) -> bool:
        """Take the group for a job of this thread's, if nothing was submitted before; then ``end`` must follow."""
        if self._num_pending != 0 or not self._turn.acquire(False):
            return False
        if self._num_pending != 0:
            self._turn.release()
            return False
        self._owner = get_ident()
        return True

    def end(self) -> None:
        """The job of this thread's is done."""
        self._owner = None
        self._turn.release()

    def run(self, job: Job) -> None:
        """Do ``job`` after everything submitted before; return, or raise what it raises, when it is done.

        Called from inside a job (a callback of its future), it runs at once: on every rank right after that job,
        whatever was queued meanwhile, so that the ranks stay in step.
        """
        if self.try_begin():
            try:
                job()
                return
            finally:
                self.end()
        if self.nested:
            job()
            return
        errors: list[BaseException] = []
        done = threading.Event()

        def report() -> None:
            try:
                job()
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        self.submit(report)
        done.wait()
        if errors:
            raise errors.pop()  # not kept here: this frame is in its traceback

    def submit(self, job: Job) -> None:
        """Queue ``job``, which must not raise.

        Raises:
            UsageError: the group has been destroyed.
        """
        if self.nested:
            job()
            return
        with self._lock:
            if self._stopped:
                raise UsageError(f"group {self._name} has been destroyed")
            self._num_pending += 1
            self._jobs.put(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=f"detcomm-{self._name}", daemon=True)
                self._thread.start()

    def submit_and_tell(self, job: Job, finish: Callable[[BaseException | None], None]) -> None:
        """Queue ``job`` and tell ``finish`` how it ended.

        Raises:
            UsageError: the group has been destroyed.
        """

        def settle() -> None:
            try:
                job()
            except BaseException as error:  # whoever waits gets it
                finish(error)
            else:
                finish(None)

        self.submit(settle)

    def stop(self, patience_s: float) -> bool:
        """Take no more jobs and end the thread; whether it has ended within ``patience_s``. Idempotent."""
        with self._lock:
            first = not self._stopped
            self._stopped = True
            thread = self._thread
            if first:
                self._jobs.put(None)
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(patience_s)
        return not thread.is_alive()

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._turn:
                self._owner = get_ident()
                try:
                    job()
                finally:
                    self._owner = None
            del job  # its tensors are released before the next one comes
            with self._lock:
                self._num_pending -= 1
