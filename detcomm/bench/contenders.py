# SPDX-License-Identifier: Apache-2.0
"""Who is measured. A contender turns a case and its memory into a function of no arguments that does it once.

    detcomm   the backend through ``torch.distributed``, as a user calls it
    native    detcomm's native call over shared memory alone, without torch around it
    mpi       MPI through mpi4py
    any other name: a backend of ``torch.distributed``, through the same calls

The reduced tensor of an all-reduce is its input, in place, as training has it; MPI is called in place as well.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from detcomm.association import TREE
from detcomm.bench.cases import Case
from detcomm.collectives import Collective, DType
from detcomm.errors import UsageError
from detcomm.options import Options
from detcomm.transports.base import Bytes

CONTENDERS = ("detcomm", "native", "mpi", "gloo")
TIMEOUT_S = 300.0


class Contender(ABC):
    """One library, connected."""

    name: str

    @abstractmethod
    def refusal(self, case: Case) -> str | None:
        """Why it cannot run the case; ``None`` if it can."""

    @abstractmethod
    def bind(self, case: Case, input: Bytes, output: Bytes) -> Callable[[], object]:
        """The case on this memory, to be called again and again. For an all-reduce both are the same memory."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect."""


class TorchContender(Contender):
    """A backend of ``torch.distributed``, in a group of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._group = dist.new_group(backend=name, timeout=timedelta(seconds=TIMEOUT_S))

    def refusal(self, case: Case) -> str | None:
        return None

    def bind(self, case: Case, input: Bytes, output: Bytes) -> Callable[[], object]:
        dtype = getattr(torch, case.dtype.value)
        group = self._group
        given, received = torch.from_numpy(input).view(dtype), torch.from_numpy(output).view(dtype)
        if case.collective is Collective.ALL_REDUCE:
            return lambda: dist.all_reduce(received, group=group)
        if case.collective is Collective.REDUCE:
            return lambda: dist.reduce(received, 0, group=group)
        if case.collective is Collective.REDUCE_SCATTER:
            scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # the name since torch 2.13
            return lambda: scatter(received, given, group=group)
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return lambda: gather(received, given, group=group)

    def close(self) -> None:
        dist.destroy_process_group(self._group)


class NativeContender(Contender):
    """Shared memory's native collectives, called without torch."""

    name = "native"

    def __init__(self) -> None:
        from detcomm.shared_memory_rendezvous import meet

        store = dist.PrefixStore("bench/native", dist.distributed_c10d._get_default_store())
        chunk_bytes = Options.from_environment().chunk_bytes
        self._transport = meet(
            store, dist.get_rank(), dist.get_world_size(), chunk_bytes=chunk_bytes, timeout_s=TIMEOUT_S
        )

    def refusal(self, case: Case) -> str | None:
        return None

    def bind(self, case: Case, input: Bytes, output: Bytes) -> Callable[[], object]:
        call = case.call(self._transport.world_size)
        collectives = self._transport.native_collectives
        assert collectives is not None
        run = collectives.run
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

    def refusal(self, case: Case) -> str | None:
        if case.dtype in (DType.BFLOAT16, DType.FLOAT16) and case.collective.reduces:
            return f"MPI has no {case.dtype.value}"
        return None

    def bind(self, case: Case, input: Bytes, output: Bytes) -> Callable[[], object]:
        comm, mpi = self._comm, self._mpi
        if case.collective is Collective.ALL_GATHER:
            return lambda: comm.Allgather(input, output)
        given, received = input.view(case.dtype.value), output.view(case.dtype.value)
        if case.collective is Collective.ALL_REDUCE:
            return lambda: comm.Allreduce(mpi.IN_PLACE, received, mpi.SUM)
        if case.collective is Collective.REDUCE:
            sent = mpi.IN_PLACE if comm.Get_rank() == 0 else received
            return lambda: comm.Reduce(sent, received, mpi.SUM, 0)
        return lambda: comm.Reduce_scatter_block(given, received, mpi.SUM)

    def close(self) -> None:
        self._comm.Free()


def open_contender(name: str) -> Contender:
    """Connect a contender by its name. All ranks call this, in the same order.

    Raises:
        UsageError: what it needs is not installed.
    """
    if name == "native":
        return NativeContender()
    if name == "mpi":
        return MpiContender()
    return TorchContender(name)


def memory_of(case: Case, rank: int, world_size: int) -> tuple[Bytes, Bytes]:
    """Input and output for one contender: touched, so that no page is mapped during the measurement."""
    input = case.input(rank, world_size)
    if case.collective in (Collective.ALL_REDUCE, Collective.REDUCE):
        return input, input
    call = case.call(world_size)
    return input, np.ones(call.output_count(rank) * call.dtype.itemsize, np.uint8)
