# SPDX-License-Identifier: Apache-2.0
"""A library to examine whose ranks are threads, and whose reduction is any function of all ranks' contributions.

    results = examine_by_threads(4, reduce, function)       # function(examined) on every rank

So tools can be shown libraries that round at each hop, add in some odd order, or break a promise.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from detcomm.collectives import Collective, DType, ReduceOp, is_legal
from detcomm.options import Options
from detcomm.reducers import Examined, Reducer
from detcomm.transports.base import Bytes

T = TypeVar("T")
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Request:
    """One all-reduce, as the library under examination sees it.

    Attributes:
        rank: the group rank that is answered.
        processes: which process has which group rank.
        index: how many reductions this group has done before.
    """

    rank: int
    processes: tuple[int, ...]
    index: int
    op: ReduceOp
    dtype: DType
    inputs: tuple[Bytes, ...]
    options: Options | None


Reduce = Callable[[Request], Bytes]


def examine_by_threads(
    world_size: int, reduce: Reduce, function: Callable[[Examined], T], name: str = "threads"
) -> list[T]:
    """Run ``function`` on every rank of an examination and return the results by rank."""
    table = _Table(world_size)

    def body(rank: int) -> T:
        try:
            return function(_ThreadExamined(table, rank, reduce, name))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(body, range(world_size)))


class _Table:
    """Where the ranks put what the others shall see."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size)
        self.values: list[Any] = [None] * world_size


class _ThreadExamined(Examined):
    device = "cpu"

    def __init__(self, table: _Table, rank: int, reduce: Reduce, name: str) -> None:
        self.name = name
        self.rank = rank
        self.world_size = len(table.values)
        self._table = table
        self._reduce = reduce

    def refusal(self, op: ReduceOp, dtype: DType) -> str | None:
        return None if is_legal(op, dtype) else "not legal"

    def tell(self, value: Any) -> list[Any]:
        self._table.values[self.rank] = value
        self._table.barrier.wait(PATIENCE_S)
        told = list(self._table.values)
        self._table.barrier.wait(PATIENCE_S)
        return told

    def _open(self, order: Sequence[int], options: Options | None) -> Reducer:
        assert len(order) == self.world_size, "this library has groups of all ranks alone"
        return _ThreadReducer(self, tuple(order), options)

    def _close(self) -> None:
        pass

    def close(self) -> None:
        pass

    def all_inputs(self, data: Bytes, processes: Sequence[int]) -> tuple[Bytes, ...]:
        told = self.tell(data.copy())
        return tuple(told[process] for process in processes)

    def result(self, request: Request) -> Bytes:
        return self._reduce(request)


class _ThreadReducer(Reducer):
    def __init__(self, examined: _ThreadExamined, processes: tuple[int, ...], options: Options | None) -> None:
        self.rank = processes.index(examined.rank)
        self.world_size = len(processes)
        self._examined = examined
        self._processes = processes
        self._options = options
        self._num_reductions = 0

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
        inputs = self._examined.all_inputs(input, self._processes)
        request = Request(self.rank, self._processes, self._num_reductions, op, dtype, inputs, self._options)
        self._num_reductions += 1
        result = self._examined.result(request)
        if collective is Collective.REDUCE and self.rank != root:
            return np.empty(0, np.uint8)
        if collective is Collective.REDUCE_SCATTER:
            return result.reshape(self.world_size, -1)[self.rank].copy()
        return result

    def all_gather(self, input: Bytes) -> Bytes:
        return np.concatenate(self._examined.all_inputs(input, self._processes))

    def broadcast(self, data: Bytes, root: int) -> Bytes:
        return self._examined.all_inputs(data, self._processes)[root]
