# SPDX-License-Identifier: Apache-2.0
"""The collectives of one group: refuse, agree, then run a cached plan or the transport's native path.

The one object that the torch side talks to. Knows neither torch nor how a plan or a transport works. One thread at
a time calls ``run`` and ``run_many``, and all ranks call them in the same order; ``abort`` may come from any thread.
"""

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, NoReturn

import attrs
import numpy as np

from detcomm.agreement import Agreement
from detcomm.call import Call
from detcomm.collectives import ReduceOp
from detcomm.errors import MismatchError, TransportError, UsageError
from detcomm.executor import PreparedPlan
from detcomm.fold import premultiply
from detcomm.header import call_text, digest, header_for
from detcomm.memory import address, may_run_in_place
from detcomm.options import Options
from detcomm.planner import PlanOptions, make_plan
from detcomm.transports.base import Bytes, NativeCollectives, Transport

CACHED_PLANS = 256
CACHED_CALLS = 1024
_ALIGNMENT_BYTES = 64


class Request(NamedTuple):
    """One collective and its memory on this rank.

    Attributes:
        call: what all ranks must agree on.
        input: ``call.input_count(rank)`` elements.
        output: ``call.output_count(rank)`` elements; may share memory with ``input`` in any way.
        factor: this rank's own factor, for PREMUL_SUM alone.
        label: the element type as the caller knows it, where it differs from ``call.dtype`` (``complex64``);
            agreed on too.
    """

    call: Call
    input: Bytes
    output: Bytes
    factor: float | None = None
    label: str = ""


class _Prepared(NamedTuple):
    """What a call needs again and again; without a plan if the message is empty."""

    plan: PreparedPlan | None
    header: bytes
    text: str


class _Expected(NamedTuple):
    """What the memory and the factor of a call must be on this rank."""

    call: Call
    input_bytes: int
    output_bytes: int
    takes_factor: bool

    def refuse(self, request: Request) -> NoReturn:
        """Say what does not fit."""
        name = self.call.text()
        if request.input.size != self.input_bytes:
            raise UsageError(f"{name}: expected an input of {self.input_bytes} bytes, got {request.input.size}")
        if request.output.size != self.output_bytes:
            raise UsageError(f"{name}: expected an output of {self.output_bytes} bytes, got {request.output.size}")
        raise UsageError(f"{name}: expected {'a' if self.takes_factor else 'no'} factor, got {request.factor}")


class Communicator:
    """Runs collectives over one transport, under one set of options.

    Args:
        transport: owned from now on.
        options: equal on all ranks.
        block_size: ranks of one aligned block that share a host; speed only.
        name: of the group, for error texts.
    """

    def __init__(self, transport: Transport, options: Options, block_size: int, name: str) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.name = name
        self.sequence = 0
        self._options = options
        self._plan_options = PlanOptions(
            association=options.order,
            accumulate=options.accumulate,
            schedule=options.schedule,
            chunk_bytes=options.chunk_bytes,
            block_size=block_size,
        )
        # A schedule asked for by name is run as such; only "auto" leaves the choice to us.
        self._native = transport.native_collectives if options.schedule == "auto" else None
        self._options_digest = digest(str(attrs.astuple(attrs.evolve(options, timeout=None))))
        self._agreement = Agreement(transport, name)
        self._expected: dict[int, _Expected] = {}
        self._prepared = lru_cache(maxsize=CACHED_PLANS)(self._prepare)
        self._scratch: Bytes = np.empty(0, dtype=np.uint8)
        self._failure: str | None = None

    def run(
        self,
        call: Call,
        input: Bytes,
        output: Bytes,
        *,
        factor: float | None = None,
        label: str = "",
        timeout_s: float,
    ) -> None:
        """Do one collective; see ``Request`` for the arguments.

        Args:
            timeout_s: for the whole collective, agreement included.

        Raises:
            UsageError: nothing was sent.
            MismatchError: on every rank, with one text; nothing was written and the group stays usable.
            TransportError: a peer is lost or late. The group is unusable, and every later call raises at once.
        """
        self.run_many((Request(call, input, output, factor, label),), timeout_s=timeout_s)

    def run_many(self, requests: Sequence[Request], *, timeout_s: float) -> None:
        """Do several collectives, each by itself, after one agreement on all of them.

        Raises:
            UsageError, MismatchError, TransportError: as ``run``; a mismatch names the first call that differs.
        """
        if not requests:
            raise UsageError("a coalesced block needs at least one call")
        if self._failure is not None:
            raise TransportError(f"group {self.name} is unusable since an earlier error: {self._failure}")
        for request in requests:
            self._check(request)
        if self.world_size == 1:
            self.sequence += 1
            for request in requests:
                _run_alone(request)
            return
        planned = [] if self._native else [self._prepared(request.call, request.label) for request in requests]
        self.sequence += 1
        try:
            if self._native:
                self._run_native(self._native, requests, timeout_s)
            else:
                self._run_planned(planned, requests, timeout_s)
        except MismatchError:
            raise  # every rank has it, and all are in step
        except TransportError as error:
            # The others may be anywhere in the plan: let them see a lost peer now and not at their timeout.
            text = f"collective #{self.sequence} of group {self.name}: {error}"
            self.abort(text)
            raise type(error)(text) from error
        except BaseException as error:
            self.abort(f"{type(error).__name__}: {error}")
            raise

    def abort(self, reason: str) -> None:
        """End what runs on another thread, and refuse everything that comes later."""
        if self._failure is None:
            self._failure = reason
        self.transport.abort(reason)

    def close(self) -> None:
        """Release the transport. Idempotent; never waits for a peer."""
        if self._failure is None:
            self._failure = "it was closed"
        self.transport.close()
        self._prepared.cache_clear()
        self._scratch = np.empty(0, dtype=np.uint8)

    def _check(self, request: Request) -> None:
        call = request.call
        # By identity, which spares hashing the call; an entry keeps its call alive, so the identity is its own.
        known = self._expected.get(id(call)) or self._expect(call)
        if (
            request.input.size != known.input_bytes
            or request.output.size != known.output_bytes
            or (request.factor is not None) != known.takes_factor
        ):
            known.refuse(request)

    def _expect(self, call: Call) -> "_Expected":
        if call.shard_counts is not None and len(call.shard_counts) != self.world_size:
            raise UsageError(f"{call.text()}: expected {self.world_size} shards, got {len(call.shard_counts)}")
        if not 0 <= call.root < self.world_size:
            raise UsageError(f"{call.text()}: expected a root below {self.world_size}, got {call.root}")
        if len(self._expected) >= CACHED_CALLS:
            self._expected.clear()
        size = call.dtype.itemsize
        expected = _Expected(
            call,
            call.input_count(self.rank) * size,
            call.output_count(self.rank) * size,
            call.op is ReduceOp.PREMUL_SUM,
        )
        self._expected[id(call)] = expected
        return expected

    def _prepare(self, call: Call, label: str) -> _Prepared:
        plan = make_plan(call, self.rank, self.world_size, self._plan_options) if call.count else None
        header = header_for(
            [call],
            [label],
            numerics_id=self._options.numerics_id,
            schedule_fingerprint=plan.schedule_fingerprint if plan else "",
            options=self._options_digest,
        )
        return _Prepared(PreparedPlan(plan) if plan else None, header.encode(), call_text(call, label))

    def _run_native(self, native: NativeCollectives, requests: Sequence[Request], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        try:
            if len(requests) > 1:
                native.agree("\n".join(call_text(request.call, request.label) for request in requests), timeout_s)
            for request in requests:
                native.run(
                    request.call,
                    self._plan_options.association,
                    self._plan_options.accumulate,
                    request.input,
                    request.output,
                    factor=request.factor,
                    label=request.label,
                    timeout_s=max(deadline - time.monotonic(), 0.0),
                )
        except MismatchError as error:
            raise MismatchError(f"collective #{self.sequence} of group {self.name}: {error}") from error

    def _run_planned(self, planned: Sequence[_Prepared], requests: Sequence[Request], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._agreement.agree(self.sequence, self._header(planned, requests), [one.text for one in planned], timeout_s)
        for prepared, request in zip(planned, requests, strict=True):
            if prepared.plan is not None:
                self._execute(prepared.plan, request, deadline)

    def _header(self, planned: Sequence[_Prepared], requests: Sequence[Request]) -> bytes:
        if len(planned) == 1:
            return planned[0].header
        fingerprints = [one.plan.plan.schedule_fingerprint if one.plan else "" for one in planned]
        return header_for(
            [request.call for request in requests],
            [request.label for request in requests],
            numerics_id=self._options.numerics_id,
            schedule_fingerprint="\n".join(fingerprints),
            options=self._options_digest,
        ).encode()

    def _execute(self, prepared: PreparedPlan, request: Request, deadline: float) -> None:
        call, input, output = request.call, request.input, request.output
        plan_bytes = -(-prepared.plan.scratch_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        staged = request.factor is not None or not may_run_in_place(call, self.rank, input, output)
        scratch = self._scratch_of(plan_bytes + (input.size if staged else 0))
        if staged:
            copy = scratch[plan_bytes : plan_bytes + input.size]
            if request.factor is None:
                np.copyto(copy, input)
            else:
                premultiply(call.dtype, request.factor, input, copy)
            input = copy
        prepared.execute(self.transport, input, output, scratch, max(deadline - time.monotonic(), 0.0))

    def _scratch_of(self, num_bytes: int) -> Bytes:
        """Scratch that stays from call to call: fresh pages would cost a fault each."""
        if self._scratch.size < num_bytes:
            room = np.empty(num_bytes + _ALIGNMENT_BYTES, dtype=np.uint8)
            start = -address(room) % _ALIGNMENT_BYTES
            self._scratch = room[start : start + num_bytes]
        return self._scratch


def _run_alone(request: Request) -> None:
    """A world of one rank does no arithmetic but the multiplication of PREMUL_SUM: every bit stays."""
    if request.factor is not None:
        premultiply(request.call.dtype, request.factor, request.input, request.output)
    else:
        np.copyto(request.output, request.input)
