# SPDX-License-Identifier: Apache-2.0
"""Fake GPUs whose ranks read each other's memory: one call on every rank, each a thread."""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from detcomm.call import Call
from detcomm.collectives import Collective
from detcomm.cuda import native
from detcomm.cuda.bounded_plan import bounded_peer_plans
from detcomm.cuda.peer.fused import SLICE_BYTES, forms_of, make_fused_program
from detcomm.cuda.peer.layout import Layout
from detcomm.cuda.peer.program import NOTHING, InPlace, make_peer_program
from detcomm.cuda.peer_memory.regions import MAX_REGIONS
from detcomm.cuda.program import Program
from detcomm.options import Options
from detcomm.plan import Plan
from tests import fake_gpu

PAD_BYTES = 64 << 10
STAGING_BYTES = 4 << 20


class Outcome(NamedTuple):
    """One call: what each rank has, what its GPU was told, and its program."""

    outputs: list[Any]
    gpus: list[fake_gpu.FakeGpu]
    programs: list[Program]


class Peers:
    """The mapped memory of all ranks, in blocks; kept from call to call.

    Args:
        staging_bytes: of each rank.
    """

    def __init__(
        self,
        world_size: int,
        block_size: int | None = None,
        staging_bytes: int = STAGING_BYTES,
        patience_s: float = 60.0,
    ) -> None:
        self.world_size = world_size
        self.block_size = block_size or world_size
        self.staging_bytes = staging_bytes
        self.kernels, self.network = fake_gpu.Kernels(), fake_gpu.Network(world_size)
        self.gpus = [fake_gpu.FakeGpu(rank, self.network, self.kernels) for rank in range(world_size)]
        self.pads = [np.zeros(PAD_BYTES, np.uint8) for _ in range(world_size)]
        self.staging = [np.full(staging_bytes, 0xA5, np.uint8) for _ in range(world_size)]
        self.words = [np.zeros(64, np.uint32) for _ in range(world_size)]
        self.tables = [np.zeros((native.MAX_PEERS, MAX_REGIONS), np.uint64) for _ in range(world_size)]
        self.peers = [self._peers(rank, patience_s) for rank in range(world_size)]

    def block_of(self, rank: int) -> range:
        first = rank // self.block_size * self.block_size
        return range(first, min(first + self.block_size, self.world_size))

    def programs(self, call: Call, options: Options, in_place: Sequence[InPlace] | None = None) -> list[Program]:
        """Of all ranks."""
        plans = self.plans(call, options)
        layouts = [Layout(plan, set(self.block_of(plan.rank)) - {plan.rank}) for plan in plans]
        return [
            make_peer_program(
                plan,
                {mate: layouts[mate] for mate in self.block_of(plan.rank)},
                self.kernels.compiler(),
                NOTHING if in_place is None else in_place[plan.rank],
            )
            for plan in plans
        ]

    def plans(self, call: Call, options: Options) -> list[Plan]:
        """Of all ranks."""
        room = self.staging_bytes - 16 * SLICE_BYTES
        ranks = range(self.world_size)
        return list(bounded_peer_plans(call, ranks, self.world_size, options, self.block_size, room).values())

    def fused_programs(self, call: Call, options: Options, num_blocks: int) -> list[Program] | None:
        """Of all ranks, if their plans have the form."""
        forms = forms_of(dict(enumerate(self.plans(call, options))))
        if forms is None:
            return None
        return [make_fused_program(forms, rank, self.kernels.compiler(), num_blocks) for rank in forms]

    def run(
        self,
        call: Call,
        options: Options,
        given: Sequence[Any],
        in_place: bool = False,
        symmetric: Sequence[InPlace] | None = None,
        region: int = 1,
        programs: list[Program] | None = None,
    ) -> Outcome:
        """One call on every rank.

        Args:
            in_place: whether input and output are the same memory.
            symmetric: which tensors of each rank peers have mapped.
            programs: of all ranks; by default those of ``programs``.
        """
        memories, outputs = [], []
        for rank in range(self.world_size):
            memory = given[rank].copy()
            size = call.output_count(rank) * call.dtype.itemsize
            start = call.shard_starts[rank] * call.dtype.itemsize if call.collective is Collective.REDUCE_SCATTER else 0
            outputs.append(memory[start : start + size] if in_place else np.full(size, 0x5A, np.uint8))
            memories.append(memory)
            self._publish(rank, (memory, outputs[rank]), symmetric, region)
        made = programs or self.programs(call, options, symmetric)
        for gpu in self.gpus:
            gpu.calls.clear()
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                assert self.gpus[rank].run(made[rank], memories[rank], outputs[rank], peers=self.peers[rank]) is None
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        return Outcome(outputs, self.gpus, made)

    def _publish(self, rank: int, memories: tuple[Any, Any], symmetric: Sequence[InPlace] | None, region: int) -> None:
        """Each rank has its regions' numbers, and an offset, for itself: nobody may take them for alike."""
        index = rank - self.block_of(rank)[0]
        for buffer in range(2):
            self.peers[rank].places[buffer] = 0
            if symmetric is not None and symmetric[rank][buffer]:
                number, offset = region + 2 * rank + buffer, 16 * (rank + 1)
                self.peers[rank].places[buffer] = number << 48 | offset
                for mate in self.block_of(rank):
                    self.tables[mate][index, number] = memories[buffer].ctypes.data - offset

    def _peers(self, rank: int, patience_s: float) -> native.CPeers:
        block = self.block_of(rank)
        peers = native.CPeers(
            table=self.tables[rank].ctypes.data,
            words=self.words[rank].ctypes.data,
            patience_ns=int(patience_s * 1e9),
            fused_offset=self.staging_bytes - 16 * SLICE_BYTES,
            slice_bytes=SLICE_BYTES,
            pad_bytes=1024,
            index=rank - block[0],
            num_peers=len(block),
        )
        for index, mate in enumerate(block):
            peers.staging[index] = self.staging[mate].ctypes.data
            peers.pads[index] = self.pads[mate].ctypes.data
        return peers
