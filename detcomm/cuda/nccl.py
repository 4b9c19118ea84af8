# SPDX-License-Identifier: Apache-2.0
"""An own NCCL communicator: made through the group's store, polled for errors, destroyed or aborted.

Own, so that a user's sends and receives can never meet ours, and nobody else aborts it. Knows no plans and no tensors.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

from detcomm import store_access
from detcomm.cuda.libraries import UniqueId, nccl
from detcomm.errors import DetcommError, NativeError, PeerTimeoutError, TransportError

_POLL_S = 0.05
_DESTROY_S = 10.0
"""How long peers may take to come to the destruction before it becomes an abort."""


class NcclCommunicator:
    """One rank's end of a communicator.

    Args:
        store: a key space of this communicator alone.
        prepare: makes the device's context current; called on the thread that connects.
        failure: the group's first error, once there is one; ends the wait.
        timeout_s: for all ranks to come.

    Raises:
        PeerTimeoutError: not all ranks came.
        TransportError: NCCL failed, or the group did meanwhile.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        prepare: Callable[[], None],
        failure: Callable[[], BaseException | None],
        timeout_s: float,
    ) -> None:
        self._lock = threading.Lock()
        deadline = time.monotonic() + timeout_s
        unique_id = _meet(store, rank, failure, timeout_s)
        self._handle: int | None = _connect(unique_id, rank, world_size, prepare, failure, deadline)

    @property
    def handle(self) -> int | None:
        """``ncclComm_t``; ``None`` after the end."""
        return self._handle

    def check(self) -> None:
        """Ask for an error that NCCL met in the background.

        Raises:
            TransportError: there is one.
        """
        with self._lock:
            if self._handle is None:
                return
            state = ctypes.c_int()
            nccl().call("ncclCommGetAsyncError", self._handle, ctypes.byref(state))
        if state.value not in (0, 7):  # ncclSuccess, ncclInProgress
            raise TransportError(f"NCCL reports an error of a peer or of the network: {nccl().describe(state.value)}")

    def abort(self) -> None:
        """End what runs on the GPU, without the peers. From any thread. Idempotent."""
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is not None:
            nccl()["ncclCommAbort"](handle)

    def close(self) -> None:
        """Destroy in good order, together with the peers; abort if they do not come. Idempotent."""
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is None:
            return
        thread = threading.Thread(target=nccl()["ncclCommDestroy"], args=(handle,), daemon=True)
        thread.start()
        thread.join(_DESTROY_S)
        if thread.is_alive():
            nccl()["ncclCommAbort"](handle)


def _meet(store: Any, rank: int, failure: Callable[[], BaseException | None], timeout_s: float) -> UniqueId:
    unique_id = UniqueId()
    if rank == 0:
        nccl().call("ncclGetUniqueId", ctypes.byref(unique_id))
        store.set("id", bytes(unique_id).hex())
        return unique_id
    (text,) = store_access.read_all(store, ["id"], timeout_s, lambda: failure() is not None)
    if text is None:
        raise _lost("rank 0 made no NCCL communicator: has it called the same collective?", failure)
    ctypes.memmove(ctypes.byref(unique_id), bytes.fromhex(text), ctypes.sizeof(unique_id))
    return unique_id


def _connect(
    unique_id: UniqueId,
    rank: int,
    world_size: int,
    prepare: Callable[[], None],
    failure: Callable[[], BaseException | None],
    deadline: float,
) -> int:
    """On a thread of its own, since it waits for the peers and cannot be woken."""
    handle = ctypes.c_void_p()
    errors: list[BaseException] = []
    done = threading.Event()

    def connect() -> None:
        try:
            prepare()
            nccl().call("ncclCommInitRank", ctypes.byref(handle), world_size, unique_id, rank)
        except NativeError as error:
            errors.append(error)
        done.set()

    threading.Thread(target=connect, name="detcomm-nccl", daemon=True).start()
    while not done.wait(_POLL_S):
        if failure() is not None or time.monotonic() > deadline:
            raise _lost(f"the {world_size} ranks of an NCCL communicator did not connect", failure)
    if errors:
        raise TransportError(f"NCCL: rank {rank} of {world_size} cannot connect: {errors[0]}") from errors[0]
    assert handle.value is not None
    return handle.value


def _lost(text: str, failure: Callable[[], BaseException | None]) -> DetcommError:
    cause = failure()
    return PeerTimeoutError(text) if cause is None else TransportError(f"{text}: {cause}")
