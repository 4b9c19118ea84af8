# SPDX-License-Identifier: Apache-2.0
"""Who is measured. A contender turns a case and its memory into a function of no arguments that does it once.

    detcomm     the backend through ``torch.distributed``, as a user calls it
    native      detcomm's native call over shared memory alone, without torch around it
    mpi         MPI through mpi4py
    nccl-ring   NCCL with ``NCCL_ALGO=Ring``, beside ``nccl`` as it chooses by itself
    any other name: a backend of ``torch.distributed``, through the same calls

torch has no all-reduce out of place: there its contenders copy the input to the output and reduce that, as a user must.

``NCCL_ALGO`` belongs to a process, but NCCL reads it for each communicator, when it makes it (``ncclTopoTuneModel`` in
its ``src/graph/tuning.cc``). So the variable is set while the communicator of ``nccl-ring`` is made, by a first
collective, and then put back: both tunings run in one process, on the same memory, in turns.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from detcomm.association import TREE
from detcomm.bench.buffers import Buffers
from detcomm.bench.cases import Case, Place
from detcomm.collectives import Collective, DType, ReduceOp, is_legal
from detcomm.errors import UsageError
from detcomm.options import Options
from detcomm.reducers.over_torch import refusal as torch_refusal

TIMEOUT_S = 300.0

_ON_CUDA_ALONE = ("nccl", "nccl-ring")
_ON_CPU_ALONE = ("native", "mpi")
_RESERVED = (*_ON_CPU_ALONE, "nccl-ring")


class Contender(ABC):
    """One library, connected."""

    name: str

    @abstractmethod
    def refusal(self, case: Case, place: Place) -> str | None:
        """Why it cannot run the case there; ``None`` if it can."""

    @abstractmethod
    def bind(self, case: Case, place: Place, buffers: Buffers) -> Callable[[], object]:
        """The case on this memory, to be called again and again."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect."""


class TorchContender(Contender):
    """A backend of ``torch.distributed``, in a group of its own."""

    def __init__(self, name: str, backend: str, device: torch.device) -> None:
        self.name = name
        self._backend = backend
        self._device = device
        self.group: Any = dist.new_group(backend=backend, timeout=timedelta(seconds=TIMEOUT_S))

    def refusal(self, case: Case, place: Place) -> str | None:
        if not case.collective.reduces:
            return None
        return torch_refusal(self._backend, self._device.type, case.op, case.dtype)

    def bind(self, case: Case, place: Place, buffers: Buffers) -> Callable[[], object]:
        dtype = getattr(torch, case.dtype.value)
        given, received = buffers.given(place).view(dtype), buffers.received(place).view(dtype)
        collective, group, root = case.collective, self.group, case.root
        op = getattr(dist.ReduceOp, case.op.name)
        if collective is Collective.REDUCE_SCATTER:
            scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # the name since torch 2.13
            return lambda: scatter(received, given, op, group=group)
        if collective is Collective.ALL_GATHER:
            gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            return lambda: gather(received, given, group=group)
        if collective is Collective.ALL_REDUCE:
            reduce: Callable[[], object] = lambda: dist.all_reduce(received, op, group=group)  # noqa: E731
        else:
            reduce = lambda: dist.reduce(received, root, op, group=group)  # noqa: E731
        if place is Place.IN:
            return reduce
        return lambda: (received.copy_(given), reduce())

    def close(self) -> None:
        dist.destroy_process_group(self.group)


class NativeContender(Contender):
    """Shared memory's native collectives, called without torch, in the ``tree`` order."""

    name = "native"

    def __init__(self) -> None:
        from detcomm.shared_memory_rendezvous import meet

        store = dist.PrefixStore("bench/native", dist.distributed_c10d._get_default_store())
        chunk_bytes = Options.from_environment().chunk_bytes
        self._transport = meet(
            store, dist.get_rank(), dist.get_world_size(), chunk_bytes=chunk_bytes, timeout_s=TIMEOUT_S
        )

    def refusal(self, case: Case, place: Place) -> str | None:
        if case.collective.reduces and not is_legal(case.op, case.dtype):
            return f"{case.op.value} is not defined on {case.dtype.value}"
        return None

    def bind(self, case: Case, place: Place, buffers: Buffers) -> Callable[[], object]:
        call = case.call(self._transport.world_size)
        collectives = self._transport.native_collectives
        assert collectives is not None
        run = collectives.run
        input, output = buffers.given(place).numpy(), buffers.received(place).numpy()
        if not case.receives(self._transport.rank):
            output = output[:0]
        return lambda: run(call, TREE, "float32", input, output, timeout_s=TIMEOUT_S)

    def close(self) -> None:
        self._transport.close()


class MpiContender(Contender):
    """The MPI library that mpi4py finds."""

    name = "mpi"

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except ImportError:
            raise UsageError("contender mpi needs mpi4py: pip install 'detcomm[mpi]'") from None
        self._mpi: Any = MPI
        self._comm = MPI.COMM_WORLD.Dup()
        self._ops = {ReduceOp.SUM: MPI.SUM, ReduceOp.PRODUCT: MPI.PROD, ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX}

    def refusal(self, case: Case, place: Place) -> str | None:
        if not case.collective.reduces:
            return None
        if case.dtype in (DType.BFLOAT16, DType.FLOAT16, DType.BOOL):
            return f"MPI has no {case.dtype.value}"
        if case.op not in self._ops:
            return f"MPI has no {case.op.value}"
        if case.collective is Collective.REDUCE_SCATTER and place is Place.IN:
            return "MPI leaves an in-place result at the start of the buffer"
        return None

    def bind(self, case: Case, place: Place, buffers: Buffers) -> Callable[[], object]:
        comm, in_place = self._comm, self._mpi.IN_PLACE
        given, received = buffers.given(place).numpy(), buffers.received(place).numpy()
        if case.collective is Collective.ALL_GATHER:
            sent = in_place if place is Place.IN else given
            return lambda: comm.Allgather(sent, received)
        given, received = given.view(case.dtype.value), received.view(case.dtype.value)
        op = self._ops[case.op]
        if case.collective is Collective.ALL_REDUCE:
            sent = in_place if place is Place.IN else given
            return lambda: comm.Allreduce(sent, received, op)
        if case.collective is Collective.REDUCE:
            sent = in_place if place is Place.IN and case.receives(comm.Get_rank()) else given
            return lambda: comm.Reduce(sent, received, op, case.root)
        return lambda: comm.Reduce_scatter_block(given, received, op)

    def close(self) -> None:
        self._comm.Free()


def check_contenders(names: list[str], device: str) -> None:
    """Refuse what cannot be opened, before any rank is started.

    Raises:
        UsageError: a name that torch does not know, or one that is not for tensors on ``device``.
    """
    known = {name.lower() for name in dist.Backend.backend_list}
    for name in names:
        if name not in known and name not in _RESERVED:
            may_be = ", ".join(sorted((known | set(_RESERVED)) - {"undefined"}))
            raise UsageError(f"--against: expected some of {may_be}, got {name!r}")
        if device == "cpu" and name in _ON_CUDA_ALONE:
            raise UsageError(f"--against {name} needs --device cuda")
        if device == "cuda" and name in _ON_CPU_ALONE:
            raise UsageError(f"--against {name} is measured on cpu, got --device cuda")
    if len(set(names)) != len(names):
        raise UsageError(f"--against: each name once, got {', '.join(names)}")


def open_contender(name: str, device: torch.device) -> Contender:
    """Connect a contender by its name. All ranks call this, in the same order.

    Raises:
        UsageError: what it needs is not installed.
    """
    if name == "native":
        return NativeContender()
    if name == "mpi":
        return MpiContender()
    if name != "nccl-ring":
        return TorchContender(name, name, device)
    with _environment("NCCL_ALGO", "Ring"):
        contender = TorchContender(name, "nccl", device)
        dist.all_reduce(torch.zeros(1, device=device), group=contender.group)  # makes the communicator
        torch.cuda.synchronize(device)
    return contender


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A variable of the process's environment, which the libraries in it see too, for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
