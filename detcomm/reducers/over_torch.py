# SPDX-License-Identifier: Apache-2.0
"""Any backend of torch.distributed, by its name, through torch's public calls.

Groups are made as the default group, since ``new_group`` sorts its ranks on older releases; each has its own part of
the job's store. The ranks speak with each other through that store, so that the backend is asked for reductions alone.
"""

import base64
import importlib
import os
import pickle
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from detcomm import shared_gpus
from detcomm.collectives import Collective, DType, ReduceOp, is_legal
from detcomm.errors import UsageError
from detcomm.options import Options
from detcomm.reducers.base import PATIENCE_S, Examined, Reducer
from detcomm.transports.base import Bytes

_OPS: dict[ReduceOp, Any] = {
    op: getattr(dist.ReduceOp, op.name)
    for op in ReduceOp
    if op is not ReduceOp.PREMUL_SUM and hasattr(dist.ReduceOp, op.name)
}

_NOT_ON_GLOO = {ReduceOp.AVG, ReduceOp.PREMUL_SUM}
_GLOO_DTYPES = {
    DType.FLOAT32,
    DType.FLOAT64,
    DType.FLOAT16,
    DType.BFLOAT16,
    DType.INT8,
    DType.UINT8,
    DType.INT32,
    DType.INT64,
}
_BITWISE = {ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR}
_NCCL_DTYPES = _GLOO_DTYPES | {DType.BOOL}


def refusal(backend: str, device: str, op: ReduceOp, dtype: DType) -> str | None:
    """Why a backend of torch.distributed has no such reduction on ``cpu`` or ``cuda``; ``None`` if it has one."""
    if not is_legal(op, dtype):
        return f"{op.value} is not defined on {dtype.value}"
    if "detcomm" in backend:
        return None
    is_gloo = "gloo" in backend and device == "cpu"
    if dtype not in (_GLOO_DTYPES if is_gloo else _NCCL_DTYPES):
        return f"{backend} has no {dtype.value}"
    if is_gloo and op in _NOT_ON_GLOO:
        return f"{backend} has no {op.value}"
    if "nccl" in backend and op in _BITWISE:
        return f"{backend} has no {op.value}"
    if op is ReduceOp.PREMUL_SUM and "nccl" not in backend:
        return f"{backend} has no {op.value}"
    return None


class TorchReducer(Reducer):
    """The default group's reductions."""

    def __init__(self, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._device = device

    def reduce(
        self,
        collective: Collective,
        op: ReduceOp,
        dtype: DType,
        input: Bytes,
        *,
        root: int = 0,
        factor: float | None = None,
    ) -> Bytes:
        torch_op = _OPS[op] if factor is None else dist._make_nccl_premul_sum(factor)
        tensor = self._tensor(input, dtype)
        if collective is Collective.ALL_REDUCE:
            dist.all_reduce(tensor, torch_op)
        elif collective is Collective.REDUCE:
            dist.reduce(tensor, root, torch_op)
            if self.rank != root:
                return np.empty(0, np.uint8)
        else:
            shard = torch.empty(tensor.numel() // self.world_size, dtype=tensor.dtype, device=self._device)
            dist.reduce_scatter_tensor(shard, tensor, torch_op)
            tensor = shard
        return _bytes(tensor)

    def all_gather(self, input: Bytes) -> Bytes:
        output = torch.empty(self.world_size * input.size, dtype=torch.uint8, device=self._device)
        dist.all_gather_into_tensor(output, self._tensor(input, DType.UINT8))
        return _bytes(output)

    def broadcast(self, data: Bytes, root: int) -> Bytes:
        tensor = self._tensor(data, DType.UINT8)
        dist.broadcast(tensor, root)
        return _bytes(tensor)

    def _tensor(self, data: Bytes, dtype: DType) -> torch.Tensor:
        memory = torch.from_numpy(data.copy())
        return memory.view(getattr(torch, dtype.value)).to(self._device)


def check_device(device: str) -> None:
    """Refuse a device that is none, or not here.

    Raises:
        UsageError: saying which.
    """
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device: expected cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here")


def check_backend(backend: str, device: str, imports: Sequence[str]) -> None:
    """Import what registers a backend, then refuse one that torch does not know, or not on this device.

    Raises:
        UsageError: saying which, and what there is.
    """
    for module in imports:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UsageError(f"--import {module}: {error}") from error
    known = {name.lower() for name in dist.Backend.backend_list} - {"undefined"}
    names = [part.rpartition(":")[2] for part in backend.lower().split(",")]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(
            f"--backend: torch knows no {unknown[0]!r}; it knows {', '.join(sorted(known - {'mpi'}))}, and mpi"
        )
    check_device(device)
    if device == "cpu" and backend == "nccl":
        raise UsageError("--backend nccl needs --device cuda")


def own_device(device: str) -> torch.device:
    """This rank's device, made the current one; ranks of a host take its GPUs in turn, and share them if need be."""
    if device == "cpu":
        return torch.device("cpu")
    rank, num_ranks = (int(os.environ.get(f"LOCAL_{name}", one)) for name, one in (("RANK", "0"), ("WORLD_SIZE", "1")))
    shared_gpus.share(int(os.environ.get("RANK", "0")), num_ranks, torch.cuda.device_count())
    chosen = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen


def _bytes(tensor: torch.Tensor) -> Bytes:
    array: Bytes = tensor.cpu().contiguous().view(torch.uint8).numpy()
    return array


class TorchExamined(Examined):
    """A backend of torch.distributed, or a list of them by device as ``init_process_group`` takes it."""

    def __init__(self, backend: str, device: str, imports: Sequence[str]) -> None:
        check_backend(backend, device, imports)
        warnings.filterwarnings("ignore", category=FutureWarning)  # torch renames collectives from release to release
        self.name = backend
        self.device = device
        timeout = timedelta(seconds=PATIENCE_S)
        store, self.rank, self.world_size = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        self._store = dist.PrefixStore("detcomm/examined", store)
        self._num_told = 0
        self._device = own_device(device)

    def refusal(self, op: ReduceOp, dtype: DType) -> str | None:
        return refusal(self.name, self.device, op, dtype)

    def tell(self, value: Any) -> list[Any]:
        self._num_told += 1
        prefix = f"told/{self._num_told}"
        self._store.set(f"{prefix}/{self.rank}", base64.b85encode(pickle.dumps(value)).decode())
        told = [pickle.loads(base64.b85decode(self._store.get(f"{prefix}/{rank}"))) for rank in range(self.world_size)]
        # A rank that came to this round has read the one before last: its own value there is no longer needed.
        if self._num_told > 2:
            self._store.delete_key(f"told/{self._num_told - 2}/{self.rank}")
        return told

    def _open(self, order: Sequence[int], options: Options | None) -> Reducer:
        dist.init_process_group(
            self.name,
            store=dist.PrefixStore(f"group/{'-'.join(map(str, order))}/{self.num_groups}", self._store),
            rank=list(order).index(self.rank),
            world_size=len(order),
            timeout=timedelta(seconds=PATIENCE_S),
            pg_options=options if "detcomm" in self.name else None,
        )
        return TorchReducer(self._device)

    def _close(self) -> None:
        dist.destroy_process_group()

    def close(self) -> None:
        self._store.set(f"left/{self.rank}", "")
        if self.rank == 0:  # it may be the one that serves the store: it leaves last
            self._store.wait([f"left/{rank}" for rank in range(self.world_size)])
