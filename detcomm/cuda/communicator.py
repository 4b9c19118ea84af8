# SPDX-License-Identifier: Apache-2.0
"""The collectives of one group on one device: plans made ready, scratch, and one native call for each.

As ``detcomm.communicator`` is for host memory; but a call returns when its work is in the stream, and nothing here
waits for the GPU. One plan at a time is issued to a device, whatever group and thread it comes from: two communicators
whose operations were mixed in different orders on two ranks would wait for each other for ever. But while one connects
to its peers, others go on.

Knows torch only through the two functions that it is given: one allocates, one says whether a graph is captured.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from detcomm.cuda.carrier import Carrier, Membership
from detcomm.cuda.contribution import contribute
from detcomm.cuda.device import PATIENCE_S, device_lock, issuing_to
from detcomm.cuda.events import Event, EventPool
from detcomm.cuda.in_flight import InFlight, InFlightQueue
from detcomm.cuda.kernels import Kernels
from detcomm.cuda.libraries import driver, relaxed_capture
from detcomm.cuda.native_call import IN_ORDER, Order, Streams
from detcomm.cuda.peer_memory.memory import PeerMemory
from detcomm.cuda.prepared import Prepared
from detcomm.cuda.reference_call import Mover
from detcomm.cuda.scratch import Block, Scratch
from detcomm.errors import NativeError, PeerTimeoutError, TransportError
from detcomm.memory import DeviceMemory, device_may_run_in_place
from detcomm.request import Request


class CudaCommunicator:
    """Runs collectives over one NCCL communicator, on one device.

    Args:
        member: the group, as this rank sees it.
        allocate: gives device memory, of the graph's own pool while one is captured.
        mover: moves the bytes, for the reference path.
    """

    def __init__(
        self, member: Membership, kernels: Kernels, allocate: Callable[[int], Block], mover: Mover | None = None
    ) -> None:
        self.name = member.name
        self.rank = member.rank
        self.world_size = member.world_size
        self.kernels = kernels
        self.sequence = 0
        self.has_captured = False
        self._lock = threading.RLock()
        self._device_lock = device_lock(kernels.device)
        self._issuing: InFlight | None = None
        self._make_current = kernels.make_current
        self._pool = EventPool()
        self._in_flight = InFlightQueue()
        self._scratch = Scratch(member.options.scratch_bytes, allocate)
        self._last_stream = 0
        self._last: Event | None = None
        self._last_captured: tuple[int, Event | None, int] = (0, None, 0)  # the capture, behind the call, its stream
        self._carrier = Carrier(member, kernels, self._pool, mover)
        self._calls = self._carrier.calls
        self._native = self._carrier.native

    def run_many(
        self, requests: Sequence[Request], streams: Streams, *, capturing: bool, timeout_s: float, kept: list[Any]
    ) -> Event:
        """Issue several collectives, each reduced by itself.

        Args:
            requests: of device memory.
            capturing: whether ``streams.main`` is part of a graph that is being captured.
            timeout_s: for the GPU to be done, from now.
            kept: kept alive until the GPU is done, or until the caller empties the list; grows by a graph's scratch.

        Returns:
            An event behind the last of it on ``streams.main``.

        Raises:
            UsageError: sizes do not fit; nothing was issued.
            TransportError: NCCL or CUDA refused; the group is unusable.
        """
        found = [self._calls.find(request) for request in requests]
        with self._lock:
            prepared = [call or self._prepare(each, capturing) for call, each in zip(found, requests, strict=True)]
            done = self._pool.take(self.kernels.make_current)
            first, num_more, deadline = requests[0], len(requests) - 1, time.monotonic() + timeout_s
            record = InFlight(self.sequence + 1, first.call, first.label, num_more, done, deadline, [kept])
            self._issuing = record  # it may take until peers come
            try:
                with issuing_to(self.kernels.device):
                    self._issue_all(requests, prepared, streams, capturing, kept, done)
                    self._issued(record, streams, capturing)
            except NativeError as error:
                self.abort()
                raise TransportError(f"group {self.name}, collective #{self.sequence}: {error}") from error
            finally:
                self._issuing = None
            return done

    def find_prepared(self, request: Request) -> Prepared | None:
        """What a request's call needs, if it was made before."""
        return self._calls.find(request)

    def run_prepared(
        self,
        call: Prepared,
        label: str,
        input: int,
        output: int,
        streams: Streams,
        timeout_s: float,
    ) -> None:
        """Issue one call on the current stream, which captures no graph; as ``run_many``, with less ado.

        Written out: between collectives Python runs with cold caches, where each function more costs a microsecond.

        Args:
            call: has a program.
            input: address of the input. Memory fits, and is in place or apart.
            output: address of the output.
        """
        with self._lock:
            done = self._pool.take(self._make_current)
            self.sequence += 1
            last = self._last
            follows = last is None or self._last_stream == streams.main
            order = IN_ORDER if last is None or follows else Order(0, 0, last.handle)
            is_held = self._device_lock.acquire(True, PATIENCE_S)
            try:
                buffers = (input, output, self._scratch.take(call.scratch_bytes))
                self._carrier.issue(call, streams, buffers, order, done.handle)
            except NativeError as error:
                self.abort()
                raise TransportError(f"group {self.name}, collective #{self.sequence}: {error}") from error
            finally:
                if is_held:
                    self._device_lock.release()
            self._last_stream, self._last = streams.main, done
            deadline = time.monotonic() + timeout_s
            self._in_flight.add(InFlight(self.sequence, call.call, label, 0, done, deadline, self._scratch.outgrown()))

    def poll(self) -> None:
        """Let go of what is done, and look for what will never be. Called again and again, from any thread.

        Raises:
            PeerTimeoutError: the oldest call is not done in time.
            TransportError: NCCL or the device has failed.
        """
        restore = relaxed_capture()
        try:
            self.kernels.make_current()
            oldest = self._in_flight.let_go(self._carrier.check) or self._issuing
            self._carrier.check()
        except (NativeError, TransportError) as error:
            at = "" if self.oldest is None else f" in collective #{self.oldest.sequence}, {self.oldest.text}"
            kind = PeerTimeoutError if isinstance(error, PeerTimeoutError) else TransportError
            raise kind(f"group {self.name}, rank {self.rank}{at}: {error}") from error
        finally:
            restore()
        if oldest is not None and time.monotonic() > oldest.deadline:
            raise PeerTimeoutError(
                f"group {self.name}: collective #{oldest.sequence}, {oldest.text}, is not done on the GPU of rank "
                f"{self.rank} within its timeout"
            )

    @property
    def peer_memory(self) -> PeerMemory | None:
        """What the ranks of a host have mapped of each other, if they have."""
        return None if self._carrier.peers is None else self._carrier.peers.memory

    @property
    def oldest(self) -> InFlight | None:
        """The call that the GPU is at, or a thread that issues it; if any."""
        return self._in_flight.oldest or self._issuing

    def abort(self) -> None:
        """End what runs on the GPU; its results are garbage. From any thread."""
        self._carrier.abort()

    def close(self) -> None:
        """Release everything; the GPU is done with it."""
        self._carrier.close()
        self._in_flight.clear()
        self._scratch.release()

    # -- one call -----------------------------------------------------------------------------------------------

    def _prepare(self, request: Request, capturing: bool) -> Prepared:
        """For the first time: compiles, and refuses what does not fit."""
        self._calls.check(request)
        self.kernels.make_current()
        restore = relaxed_capture() if capturing else None
        try:
            return self._calls.make(request.call)
        finally:
            if restore is not None:
                restore()

    def _order(self, streams: Streams, capturing: bool) -> Order:
        """Behind the caller's stream, and behind the last call that used the same scratch or segment."""
        last, stream = self._last, self._last_stream
        if capturing:
            capture, last, stream = self._last_captured
            last = last if capture and capture == self._carrier.capture(streams) else None
        return self._native.order(streams, last.handle if last is not None and stream != streams.main else 0)

    def _issued(self, record: InFlight, streams: Streams, capturing: bool) -> None:
        """Remember what the GPU has to do; what is captured, it does when the graph is replayed."""
        if capturing:
            self.has_captured = True
            self._last_captured = self._carrier.capture(streams), record.event, streams.main
            return
        self._last_stream, self._last = streams.main, record.event
        record.kept.extend(self._scratch.outgrown())
        self._in_flight.add(record)

    def _issue_all(
        self,
        requests: Sequence[Request],
        prepared: Sequence[Prepared],
        streams: Streams,
        capturing: bool,
        kept: list[Any],
        done: Event,
    ) -> None:
        """One after the other: the first behind the caller's work and the last call with the same scratch."""
        order = self._order(streams, capturing)
        num_left = len(requests)
        for request, call in zip(requests, prepared, strict=True):
            self.sequence += 1
            num_left -= 1
            self._issue(request, call, streams, order, 0 if num_left else done.handle, capturing, kept)
            order = IN_ORDER

    def _issue(
        self,
        request: Request,
        call: Prepared,
        streams: Streams,
        order: Order,
        done: int,
        capturing: bool,
        kept: list[Any],
    ) -> None:
        input: Any = request.input
        output: Any = request.output
        if call.program is None:
            self._issue_alone(request, streams.main, order, done)
            return
        num_bytes = call.scratch_bytes
        is_staged = request.factor is not None or not device_may_run_in_place(call.call, self.rank, input, output)
        if is_staged:
            num_bytes += input.size
        scratch = self._scratch.take_for(num_bytes, capturing, kept)
        if is_staged:
            staged = DeviceMemory(scratch + call.scratch_bytes, input.size)
            self._native.follow(order, streams.main)
            order = IN_ORDER
            contribute(self.kernels, request, input, staged, streams.main)
            input = staged
        capture = self._carrier.capture(streams) if capturing else 0
        self._carrier.issue(call, streams, (input.start, output.start, scratch), order, done, capture)

    def _issue_alone(self, request: Request, stream: int, order: Order, done: int) -> None:
        """Nothing to exchange: an empty message, or a world of one rank, where every bit stays."""
        input: Any = request.input
        output: Any = request.output
        self._native.follow(order, stream)
        if self.world_size == 1 and request.call.count:
            contribute(self.kernels, request, input, output, stream)
        if done:
            driver().call("cuEventRecord", done, stream)
