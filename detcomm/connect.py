# SPDX-License-Identifier: Apache-2.0
"""Which transport a group runs on, and connecting it.

The candidates follow from options and hosts, which are equal on all ranks. Each is one numbered attempt with a key
space of its own, and ends in a verdict: every rank tells through the store whether it succeeded and reads what all
others say, so all ranks keep the transport, or all close it and go on to the next candidate, or all raise.
"""

import os
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import PrefixStore

from detcomm import stock_gloo
from detcomm.errors import PeerTimeoutError, TransportError, UsageError
from detcomm.header import ranks_text
from detcomm.options import Options
from detcomm.polling_store import PollingStore
from detcomm.store_access import read_all
from detcomm.transports.base import Transport
from detcomm.transports.gloo import GlooTransport
from detcomm.transports.hybrid import HybridTransport
from detcomm.transports.loopback import LoopbackHub

_MPI_JOB_VARIABLES = ("PMIX_NAMESPACE", "PMI_JOBID", "OMPI_MCA_ess_base_jobid", "SLURM_STEP_ID")


@dataclass(frozen=True)
class Site:
    """Where a group's transport is made: what its ranks know before they are connected.

    Args:
        store: a key space of this group alone.
        name: of the group, for messages.
        hosts: each rank's host, equal on all ranks.
        devices: gloo's devices on this rank.
        chunk_bytes: the option, equal on all ranks.
        timeout: for the connection.
        give_up: asked while this rank waits for the others; true ends the wait.
    """

    store: Any
    name: str
    rank: int
    hosts: tuple[str, ...]
    devices: tuple[Any, ...]
    chunk_bytes: int | None
    timeout: timedelta
    give_up: Callable[[], bool] = lambda: False

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    @property
    def local_ranks(self) -> list[int]:
        """The ranks of this rank's host, this one included."""
        return [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]


def candidates(transport: str, hosts: Sequence[str]) -> tuple[str, ...]:
    """The transports to try, best first; one alone if the options name it.

    Raises:
        UsageError: the transport named cannot connect these hosts.
    """
    num_hosts = len(set(hosts))
    if transport == "auto":
        if num_hosts == 1:
            return ("shared_memory", "gloo")
        return ("hybrid", "gloo") if num_hosts < len(hosts) else ("gloo",)
    if transport == "shared_memory" and num_hosts > 1:
        raise UsageError(f"option transport: shared_memory connects ranks of one host, and these are on {num_hosts}")
    if transport == "nccl":
        raise UsageError("option transport: nccl carries CUDA tensors; name a transport for CPU tensors, or auto")
    return (transport,)


def connect(site: Site, options: Options) -> Transport:
    """This rank's end of the group's transport. All ranks call this; all return or all raise.

    Raises:
        UsageError: the transport named in the options cannot connect these hosts.
        TransportError: no candidate worked, or the first did not and warnings are errors; the same text on every
            rank, naming ranks and reasons.
        PeerTimeoutError: ranks did not answer; names them.
    """
    if site.world_size == 1:
        return LoopbackHub(1).transports[0]
    names = candidates(options.transport, site.hosts)
    deadline = time.monotonic() + site.timeout.total_seconds()
    for number, name in enumerate(names):
        attempt = _Attempt(site, number, name, deadline)
        try:
            return attempt.run(_OPENERS[name])
        except PeerTimeoutError:
            raise
        except TransportError as error:
            if number + 1 == len(names):
                raise
            try:
                _announce(f"{error}; falling back to {names[number + 1]}", aloud=site.rank == 0)
            except RuntimeWarning as forbidden:
                raise error from forbidden
    raise AssertionError("there is always a last candidate")


def _announce(text: str, *, aloud: bool) -> None:
    """Warn on one rank. Where a filter makes the warning an error all ranks raise it: none may go on alone."""
    with nullcontext() if aloud else warnings.catch_warnings(record=True):
        warnings.warn(text, RuntimeWarning, stacklevel=3)


class _Attempt:
    """One try with one transport."""

    def __init__(self, site: Site, number: int, transport: str, deadline: float) -> None:
        self.site = site
        self._deadline = deadline
        self.store = PrefixStore(f"transport/{number}/{transport}", site.store)
        self.transport = transport
        self._is_decided = False

    @property
    def left_s(self) -> float:
        """How long this rank may still wait for the others."""
        return max(self._deadline - time.monotonic(), 0.0)

    def run(self, open_transport: Callable[["_Attempt"], Transport]) -> Transport:
        """Open the transport on all ranks; if one fails, close it on all of them and raise everywhere."""
        transport: Transport | None = None
        failure = ""
        try:
            transport = open_transport(self)
        except Exception as error:
            if self._is_decided:
                raise  # every rank has read the same verdict
            failure = _reason(error)
            if isinstance(error, PeerTimeoutError):  # the time is over: tell the others, and wait no longer
                self.store.set(f"open/{self.site.rank}", f"-{failure}")
                raise
        try:
            self.verdict("open", failure)
        except BaseException:
            if transport is not None:
                transport.close()
            raise
        assert transport is not None, "a rank without a transport has said so"
        return transport

    def verdict(self, stage: str, failure: str = "", fact: str = "") -> list[str]:
        """Tell all ranks how a stage ended here, and read how it ended there.

        Args:
            failure: why this rank cannot go on; empty if it can.
            fact: what the others need to know.

        Returns:
            Every rank's fact.

        Raises:
            TransportError: a rank cannot go on; the same text on every rank.
            PeerTimeoutError: ranks did not answer.
        """
        site = self.site
        keys = [f"{stage}/{rank}" for rank in range(site.world_size)]
        self.store.set(keys[site.rank], f"-{failure}" if failure else f"+{fact}")
        texts = read_all(self.store, keys, self.left_s, site.give_up)
        where = f"group {site.name}: transport {self.transport}"
        absent = [rank for rank, text in enumerate(texts) if text is None]
        if absent:
            self._is_decided = True
            raise PeerTimeoutError(f"{where}: {ranks_text(absent)} did not answer within the timeout (stage {stage})")
        answers = [text for text in texts if text is not None]
        failures: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            if answer.startswith("-"):
                failures.setdefault(answer[1:], []).append(rank)
        if failures:
            reasons = "; ".join(f"{ranks_text(ranks)}: {reason}" for reason, ranks in failures.items())
            self._is_decided = True
            raise TransportError(f"{where} does not work: {reasons}")
        return [answer[1:] for answer in answers]


def _open_gloo(attempt: _Attempt) -> Transport:
    site = attempt.site
    attempt.verdict("here")  # gloo itself would wait for a rank that does not come without being able to name it
    limit_s = max(attempt.left_s, 1.0)
    store = PollingStore(attempt.store, limit_s, site.give_up)
    limit = timedelta(seconds=limit_s)
    group = stock_gloo.connect_mesh(site.devices, store, "mesh", site.rank, site.world_size, limit)
    return GlooTransport(group, site.rank, site.world_size)


def _open_shared_memory(attempt: _Attempt) -> Transport:
    from detcomm.shared_memory_rendezvous import meet  # needs the native library

    site, ranks = attempt.site, attempt.site.local_ranks
    store = PrefixStore(f"host/{ranks[0]}", attempt.store)
    return meet(
        store,
        ranks.index(site.rank),
        len(ranks),
        chunk_bytes=site.chunk_bytes,
        timeout_s=attempt.left_s,
        give_up=site.give_up,
        names=ranks,
    )


def _open_hybrid(attempt: _Attempt, open_remote: Callable[[_Attempt], Transport] = _open_gloo) -> Transport:
    local: Transport | None = None
    failure = ""
    if len(attempt.site.local_ranks) > 1:
        try:
            local = _open_shared_memory(attempt)
        except Exception as error:
            failure = _reason(error)
    try:
        attempt.verdict("inside hosts", failure)  # or other hosts would wait for this one in the remote connection
        return HybridTransport(local, attempt.site.local_ranks, open_remote(attempt))
    except BaseException:
        if local is not None:
            local.close()
        raise


def _open_mpi(attempt: _Attempt) -> Transport:
    failure, fact = "", ""
    try:
        from mpi4py import MPI

        job = next((os.environ[name] for name in _MPI_JOB_VARIABLES if name in os.environ), "")
        fact = f"{MPI.COMM_WORLD.Get_rank()} of {MPI.COMM_WORLD.Get_size()} {job}"
    except Exception as error:
        failure = _reason(error)
    facts = attempt.verdict("MPI world", failure, fact)
    world_ranks = [int(fact.split()[0]) for fact in facts]
    if len(set(world_ranks)) < len(facts) or len({fact.partition(" of ")[2] for fact in facts}) > 1:
        raise UsageError(f"the ranks are not those of one MPI world, but {', '.join(facts)}; start them with mpirun")
    from detcomm.transports.mpi import MpiTransport, create_communicator

    return MpiTransport(create_communicator(world_ranks, zlib.crc32(attempt.site.name.encode())))


_OPENERS: dict[str, Callable[[_Attempt], Transport]] = {
    "shared_memory": _open_shared_memory,
    "gloo": _open_gloo,
    "hybrid": _open_hybrid,
    "hybrid_mpi": partial(_open_hybrid, open_remote=_open_mpi),
    "mpi": _open_mpi,
}


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
