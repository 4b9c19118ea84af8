# SPDX-License-Identifier: Apache-2.0
"""The CUDA half of a process group: streams as in stock NCCL, data movement by stock NCCL, and the end of both.

Knows how a call meets torch's streams, allocator and graphs; not what is done in the stream.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from detcomm.cuda.carrier import Membership
from detcomm.cuda.communicator import CudaCommunicator
from detcomm.cuda.device import issuing_to, kernels_of
from detcomm.cuda.direct_calls import CudaDirectCalls
from detcomm.cuda.native_call import Streams
from detcomm.cuda.records import compare_records
from detcomm.cuda.stock_mover import StockMover
from detcomm.cuda.watch import CudaWatch
from detcomm.cuda.works import CudaWork
from detcomm.errors import PeerTimeoutError, TransportError, UsageError
from detcomm.options import Options
from detcomm.torch_calls import Batch
from detcomm.work import FINISHED

_DRAIN_POLL_S = 0.001

# What torch.cuda's functions of these names ask, without the objects that they make: a call costs microseconds.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)

OnError = Callable[[TransportError], Any]


class CudaGroup:
    """What a group does with CUDA tensors. One device a rank.

    Args:
        store: the group's own key space.
        block_size: ranks of one aligned block that share a host; speed only.
        on_error: told of the first error of the GPU's side; makes the whole group unusable.
        failure: the group's first error, once there is one.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        world_size: int,
        options: Options,
        block_size: int,
        store: Any,
        timeout: timedelta,
        on_error: OnError,
        failure: Callable[[], BaseException | None],
    ) -> None:
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.ends_process = options.cuda_on_error == "exit"
        self._options = options
        self._block_size = block_size
        self._store = dist.PrefixStore("cuda", store)
        self._timeout = timeout
        self._on_error = on_error
        self._failure = failure
        self._lock = threading.Lock()
        self._device: torch.device | None = None
        self._communicator: CudaCommunicator | None = None
        self._stream: torch.cuda.Stream | None = None
        self._side_stream: torch.cuda.Stream | None = None
        self._side = 0
        self._movement: Any = None
        self._movement_lock = threading.Lock()
        self._open_blocks: dict[int, Any] = {}

    @property
    def sequence(self) -> int:
        """Collectives so far."""
        return 0 if self._communicator is None else self._communicator.sequence

    def reduce(self, name: str, batch: Batch, asynchronous: bool, timeout_s: float) -> dist.Work:
        """Issue a batch: on the current stream, or on the group's stream behind it."""
        device = batch.device
        if _current_device() != device.index:
            with torch.cuda.device(device):
                return self._reduce(name, batch, device, asynchronous, timeout_s)
        return self._reduce(name, batch, device, asynchronous, timeout_s)

    def _reduce(self, name: str, batch: Batch, device: torch.device, asynchronous: bool, timeout_s: float) -> dist.Work:
        capturing = _is_capturing()
        communicator = self.communicator_on(device, capturing)
        stream = self._stream
        assert stream is not None
        current = _current_stream(device.index)
        if not asynchronous:  # the stream itself keeps what it uses in order
            if batch.gather is not None:
                batch.gather()
            communicator.run_many(
                batch.requests, Streams(current, self._side), capturing=capturing, timeout_s=timeout_s, kept=[]
            )
            if batch.scatter is not None:
                batch.scatter()
            return FINISHED
        kept: list[Any] = [*batch.tensors]
        if batch.gather is not None:
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                batch.gather()
        done = communicator.run_many(
            batch.requests,
            Streams(stream.cuda_stream, self._side, current),
            capturing=capturing,
            timeout_s=timeout_s,
            kept=kept,
        )
        if batch.scatter is not None:
            with torch.cuda.stream(stream):
                batch.scatter()
            done.record(stream.cuda_stream)
        return CudaWork(name, batch.results, done, stream, kept, self._check, self._on_error, capturing)

    def direct_calls(self) -> CudaDirectCalls | None:
        """The short way of plain calls, once there is a communicator."""
        return None if self._communicator is None else CudaDirectCalls(self._communicator, self._side)

    def movement(self, device: torch.device) -> Any:
        """A stock NCCL group for what is moved without arithmetic; it connects when it is first used.

        Raises:
            UsageError: another device than this rank has used before.
        """
        with self._lock:
            self._claim(device)
        return self._inner()

    def _inner(self) -> Any:
        with self._movement_lock:
            if self._movement is None:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                store = dist.PrefixStore("movement", self._store)
                self._movement = dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)
            return self._movement

    def move(self, method: str, device: torch.device, *args: Any) -> dist.Work:
        """Call a method of the stock group, while nothing of ours is issued to the device."""
        inner = self.movement(device)
        with issuing_to(device.index):
            work: dist.Work = getattr(inner, method)(*args)
            return work

    def open_block(self, device: torch.device) -> None:
        """Gather the stock group's sends and receives of this thread from now on. Idempotent."""
        inner = self.movement(device)
        blocks = self._open_blocks
        if threading.get_ident() not in blocks:
            inner._start_coalescing()
            blocks[threading.get_ident()] = inner

    def close_block(self) -> dist.Work | None:
        """Issue what was gathered, as one NCCL group; ``None`` if nothing was."""
        inner = self._open_blocks.pop(threading.get_ident(), None)
        if inner is None or self._device is None:
            return None
        with issuing_to(self._device.index):
            work: dist.Work = inner._end_coalescing()
            return work

    def synchronize(self, timeout_s: float) -> None:
        """Block the host until everything issued is done.

        Raises:
            PeerTimeoutError: not within ``timeout_s``.
        """
        if not self._drain(timeout_s):
            raise PeerTimeoutError(f"group {self.name}: the GPU of rank {self.rank} is not done in {timeout_s:g} s")
        if self._device is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self._device).synchronize()

    def fail(self, error: BaseException) -> None:
        """The group has failed: end the process as stock NCCL does or, if asked for, abort what runs.

        A stream cannot be told: what comes behind a call that was aborted runs on with garbage.
        """
        communicator = self._communicator
        if communicator is None:
            return
        CudaWatch.remove(communicator)
        oldest = communicator.oldest
        if not self.ends_process or (oldest is None and not communicator.has_captured):
            communicator.abort()
            if self._options.cuda_path == "reference" and (movement := self._movement) is not None:
                movement.abort()  # there the stock group is what waits for peers
            return
        # Not aborted before: the streams would go on, and whoever waits for them.
        at = f"in collective #{oldest.sequence}, {oldest.text}" if oldest else "with captured graphs"
        print(
            f"detcomm: rank {self.rank} of group {self.name}, {at}: {error}\n"
            "detcomm: ending the process, since its GPU streams would run on with garbage "
            "(option cuda_on_error=raise only raises at the next call)",
            file=sys.stderr,
            flush=True,
        )
        os.kill(os.getpid(), signal.SIGABRT)

    def close(self, patience_s: float) -> bool:
        """Finish what is in flight and release everything; whether it was done within ``patience_s``."""
        is_done = self._failure() is not None or self._drain(patience_s)
        if self._communicator is not None:
            CudaWatch.remove(self._communicator)
            self._communicator.close() if is_done else self._communicator.abort()
        with self._movement_lock:
            movement, self._movement = self._movement, None
        if movement is not None:
            movement.shutdown() if is_done and self._failure() is None else movement.abort()
        return is_done

    # -- the device ---------------------------------------------------------------------------------------------

    def _claim(self, device: torch.device) -> None:
        if self._device is None:
            self._device = device
        if self._device != device:
            raise UsageError(f"group {self.name}: rank {self.rank} uses {self._device}; got a tensor on {device}")

    def communicator_on(self, device: torch.device, capturing: bool) -> CudaCommunicator:
        if self._communicator is not None and self._device == device:
            return self._communicator
        with self._lock:
            self._claim(device)
            if self._communicator is None:
                if capturing:
                    raise UsageError(
                        f"group {self.name}: the first collective of a group connects it, which cannot be captured in "
                        "a graph; call one before"
                    )
                self._connect(device)
            assert self._communicator is not None
            return self._communicator

    def _connect(self, device: torch.device) -> None:
        kernels = kernels_of(device.index)
        make_stream: Any = torch.cuda.Stream
        self._stream = make_stream(device, priority=-1)
        self._side_stream = make_stream(device, priority=-1)
        self._side = self._side_stream.cuda_stream
        member = Membership(
            self.name,
            lambda name: dist.PrefixStore(name, self._store),
            self.rank,
            self.world_size,
            self._block_size,
            self._options,
            self._failure,
            self._timeout.total_seconds(),
        )
        communicator = CudaCommunicator(
            member,
            kernels,
            lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device=device),
            StockMover(lambda: self._inner(), device) if self._options.cuda_path == "reference" else None,
        )
        self._communicator = communicator
        CudaWatch.add(communicator, self._explain)

    # -- errors -------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        failure = self._failure()
        if failure is not None:
            raise TransportError(f"group {self.name} is unusable since an earlier error: {failure}")

    def _explain(self, error: TransportError) -> None:
        """Add to a timeout what the other ranks are at, then tell the group."""
        if isinstance(error, PeerTimeoutError):
            assert self._communicator is not None
            oldest = self._communicator.oldest
            own = f"#{oldest.sequence} {oldest.text}" if oldest else "no call"
            error = PeerTimeoutError(f"{error}; {compare_records(self._store, self.rank, self.world_size, own)}")
        self._on_error(error)

    def _drain(self, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        communicator = self._communicator
        while communicator is not None and communicator.oldest is not None:
            if self._failure() is not None or time.monotonic() > deadline:
                return False
            communicator.poll()
            time.sleep(_DRAIN_POLL_S)
        return True
