# SPDX-License-Identifier: Apache-2.0
"""All ranks of a block in one process on one GPU: each has two streams, pads and a staging area of its own.

No process, no store and no NCCL: programs, native code and kernels alone.
"""

import ctypes
import os
from typing import Any

import torch

from detcomm.call import Call
from detcomm.cuda import native
from detcomm.cuda.bounded_plan import bounded_peer_plans
from detcomm.cuda.kernels import Kernels, copy_blocks, peer_copy_blocks
from detcomm.cuda.libraries import driver
from detcomm.cuda.peer.fused import MOST_BLOCKS, SLICE_BYTES, blocks_for, forms_of, make_fused_program
from detcomm.cuda.peer.layout import Layout
from detcomm.cuda.peer.path import PAD_BYTES
from detcomm.cuda.peer.program import NOTHING, InPlace, make_peer_program
from detcomm.cuda.peer_memory.regions import MAX_REGIONS
from detcomm.cuda.program import Compiler, Program
from detcomm.cuda.stream_order import NUM_EVENTS
from detcomm.options import Options

_PATIENCE_NS = 20_000_000_000

_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""One process issues for all ranks. With fewer queues than streams, what waits on one stream of a queue keeps back what
it waits for on another. Where each rank has a process, one queue is enough: the stage streams-1-peer."""


def begin() -> None:
    """Before anything else of CUDA in this process."""
    assert not torch.cuda.is_initialized(), "the environment comes too late"
    os.environ.update(_QUEUES)
    torch.cuda.set_device(0)


class OneProcess:
    """All ranks on the current device."""

    def __init__(self, world_size: int, staging_bytes: int) -> None:
        self.world_size, self.room = world_size, staging_bytes
        self.kernels = Kernels(torch.cuda.current_device())
        kernels = self.kernels
        self.compiler = Compiler(
            kernels.fold, kernels.fold_blocks, kernels.copy, copy_blocks, kernels.peer_fold, kernels.peer_copy,
            peer_copy_blocks, kernels.sync, kernels.fused,
        )  # fmt: skip
        self.pads = [zeros(64 << 10) for _ in range(world_size)]
        self.staging = [zeros(staging_bytes + MOST_BLOCKS * SLICE_BYTES) for _ in range(world_size)]
        self.words = torch.zeros(64, dtype=torch.int32).pin_memory()
        self.tables = [zeros(8 * MAX_REGIONS * world_size) for _ in range(world_size)]
        self.peers = [self._peers(rank) for rank in range(world_size)]
        make_stream: Any = torch.cuda.Stream
        self.streams = [[make_stream() for _ in range(2)] for _ in range(world_size)]
        self.events = [(ctypes.c_void_p * NUM_EVENTS)(*[_event() for _ in range(NUM_EVENTS)]) for _ in self.peers]
        self.table = native.functions_of(driver(), None)

    def programs(self, call: Call, options: Options, in_place: InPlace = NOTHING, fuses: bool = False) -> list[Program]:
        """Of all ranks."""
        ranks = range(self.world_size)
        plans = bounded_peer_plans(call, ranks, self.world_size, options, 16, self.room)
        forms = forms_of(plans)
        if fuses:
            assert forms is not None
            num_blocks = blocks_for(call.count * call.dtype.itemsize, MOST_BLOCKS)
            return [make_fused_program(forms, rank, self.compiler, num_blocks) for rank in ranks]
        layouts = {rank: Layout(plan, set(ranks) - {rank}) for rank, plan in plans.items()}
        return [make_peer_program(plans[rank], layouts, self.compiler, in_place) for rank in ranks]

    def issue(self, programs: list[Program], given: list[Any], results: list[Any]) -> None:
        """On every rank, once peers know where its tensors lie."""
        for rank in range(self.world_size):
            peers = self.peers[rank]
            for buffer, tensor in enumerate((given[rank], results[rank])):  # region 1 is the input, region 2 the output
                peers.places[buffer] = (buffer + 1) << 48
                for table in self.tables:
                    table.view(torch.int64)[MAX_REGIONS * rank + buffer + 1] = tensor.data_ptr()
        torch.cuda.synchronize()
        self.issue_only(programs, given, results)

    def issue_only(self, programs: list[Program], given: list[Any], results: list[Any]) -> None:
        """The same for tensors of the call before; the host waits for nothing."""
        for rank, program in enumerate(programs):
            peers = self.peers[rank]
            call = native.CCall(
                streams=tuple(stream.cuda_stream for stream in self.streams[rank]),
                events=ctypes.addressof(self.events[rank]),
                buffers=(given[rank].data_ptr(), results[rank].data_ptr(), peers.staging[rank]),
                context=self.kernels.context,
                peers=ctypes.addressof(peers),
            )
            failure = native.CFailure()
            status = native.library().dc_cuda_issue(
                program.address, ctypes.byref(self.table), ctypes.byref(call), ctypes.byref(failure)
            )
            assert status == 0, f"{failure.function}: {failure.code}"

    def _peers(self, rank: int) -> native.CPeers:
        peers = native.CPeers(
            table=self.tables[rank].data_ptr(), words=self.words.data_ptr(), patience_ns=_PATIENCE_NS,
            fused_offset=self.room, slice_bytes=SLICE_BYTES, pad_bytes=PAD_BYTES, index=rank,
            num_peers=self.world_size,
        )  # fmt: skip
        for index in range(self.world_size):
            peers.staging[index], peers.pads[index] = self.staging[index].data_ptr(), self.pads[index].data_ptr()
        return peers


def zeros(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")


def _event() -> int:
    handle = ctypes.c_void_p()
    driver().call("cuEventCreate", ctypes.byref(handle), 2)
    assert handle.value is not None
    return handle.value
