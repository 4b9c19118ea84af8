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
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.errors import MismatchError, TransportError, UsageError
from detcomm.executor import PreparedPlan
from detcomm.fold import premultiply
from detcomm.header import call_text, digest, header_for, header_of_movement
from detcomm.memory import address, may_run_in_place
from detcomm.movement_call import MovementCall
from detcomm.options import Options
from detcomm.planner import PlanOptions, make_plan
from detcomm.request import Request, Requirements
from detcomm.transports.base import Bytes, NativeCollectives, PreparedCall, Transport

CACHED_PLANS = 256
_ALIGNMENT_BYTES = 64
_WORD_SUM = Call(Collective.ALL_REDUCE, DType.UINT64, 1, ReduceOp.SUM)


class _Prepared(NamedTuple):
    """What a call needs again and again; without a plan if the message is empty."""

    plan: PreparedPlan | None
    header: bytes
    text: str


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
        self._requirements = Requirements(self.rank, self.world_size)
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
            self._requirements.check(request)
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
        except BaseException as error:
            self._give_up(error)

    def prepare_native(self, call: Call, label: str) -> PreparedCall | None:
        """``call`` for ``run_native``; ``None`` where calls are not run natively as a whole.

        Raises:
            UsageError: the call does not fit this group.
        """
        if self._native is None or self.world_size == 1:
            return None
        self._requirements.of(call)
        return self._native.prepare(call, self._plan_options.association, self._plan_options.accumulate, label)

    def run_native(self, prepared: PreparedCall, source: int, target: int, timeout_s: float) -> None:
        """``run`` of a prepared call without a factor, on memory that is known to fit, by its addresses.

        Raises:
            MismatchError, TransportError: as ``run``.
        """
        if self._failure is not None or self._native is None:
            raise TransportError(f"group {self.name} is unusable since an earlier error: {self._failure}")
        self.sequence += 1
        try:
            self._native.run_prepared(prepared, source, target, timeout_s)
        except MismatchError as error:
            raise self._numbered(error) from error
        except BaseException as error:
            self._give_up(error)

    def agree(self, movement: MovementCall, remainder: int | None = None, *, timeout_s: float) -> int:
        """Return when every rank has come here with the same movement, which is done by other means afterwards.

        Args:
            remainder: a number modulo 2^64, given by all ranks or by none.

        Returns:
            The sum of all ranks' remainders.

        Raises:
            MismatchError, TransportError: as ``run``.
        """
        if self._failure is not None:
            raise TransportError(f"group {self.name} is unusable since an earlier error: {self._failure}")
        self.sequence += 1
        total: int | None
        try:
            if self._native:
                return self._native.agree(movement.text(), timeout_s, remainder)
            header = header_of_movement(movement, self._options.numerics_id, self._options_digest).encode()
            total = self._agreement.agree(self.sequence, header, [movement.text()], timeout_s, remainder or 0)
        except MismatchError as error:
            raise (self._numbered(error) if self._native else error) from error
        except BaseException as error:
            self._give_up(error)
        if total is None and remainder is not None:
            word = np.array([remainder], dtype=np.uint64)
            self.run(_WORD_SUM, word.view(np.uint8), word.view(np.uint8), timeout_s=timeout_s)
            return int(word[0])
        return total or 0

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
            raise self._numbered(error) from error

    def _numbered(self, error: MismatchError) -> MismatchError:
        return MismatchError(f"collective #{self.sequence} of group {self.name}: {error}")

    def _give_up(self, error: BaseException) -> NoReturn:
        """Raise what a call ended with. Unless all ranks have it and are in step, the group is of no use any more."""
        if isinstance(error, MismatchError):
            raise error
        if isinstance(error, TransportError):
            # The others may be anywhere in the call: let them see a lost peer now and not at their timeout.
            text = f"collective #{self.sequence} of group {self.name}: {error}"
            self.abort(text)
            raise type(error)(text) from error
        self.abort(f"{type(error).__name__}: {error}")
        raise error

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
