# SPDX-License-Identifier: Apache-2.0
"""MPI's own reductions, through mpi4py: MPICH, Open MPI or another, whichever mpi4py finds.

MPI reduces in the types that NumPy has; it knows no 16-bit floats, no AVG and no PREMUL_SUM.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from detcomm.collectives import Collective, DType, ReduceOp, is_legal
from detcomm.errors import UsageError
from detcomm.options import Options
from detcomm.reducers.base import Examined, Reducer
from detcomm.transports.base import Bytes

_NOT_IN_MPI = {DType.BFLOAT16, DType.FLOAT16, DType.BOOL}


class MpiReducer(Reducer):
    """The reductions of one communicator."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self.rank = comm.Get_rank()
        self.world_size = comm.Get_size()
        self._comm = comm
        self._ops = {
            ReduceOp.SUM: MPI.SUM,
            ReduceOp.PRODUCT: MPI.PROD,
            ReduceOp.MIN: MPI.MIN,
            ReduceOp.MAX: MPI.MAX,
            ReduceOp.BAND: MPI.BAND,
            ReduceOp.BOR: MPI.BOR,
            ReduceOp.BXOR: MPI.BXOR,
        }

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
        values = input.view(dtype.value)
        mpi_op = self._ops[op]
        if collective is Collective.ALL_REDUCE:
            output = np.empty_like(values)
            self._comm.Allreduce(values, output, mpi_op)
        elif collective is Collective.REDUCE:
            output = np.empty_like(values)
            self._comm.Reduce(values, output if self.rank == root else None, mpi_op, root)
            if self.rank != root:
                output = output[:0]
        else:
            output = np.empty(values.size // self.world_size, values.dtype)
            self._comm.Reduce_scatter_block(values, output, mpi_op)
        return output.view(np.uint8)

    def all_gather(self, input: Bytes) -> Bytes:
        output = np.empty(self.world_size * input.size, np.uint8)
        self._comm.Allgather(input, output)
        return output

    def broadcast(self, data: Bytes, root: int) -> Bytes:
        output = data.copy()
        self._comm.Bcast(output, root)
        return output


class MpiExamined(Examined):
    """The MPI library of this job."""

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except ImportError:
            raise UsageError("--backend mpi needs mpi4py: pip install 'detcomm[mpi]'") from None
        self._world = MPI.COMM_WORLD
        self._comm: Any = None
        self.name = "mpi"
        self.device = "cpu"
        self.rank = self._world.Get_rank()
        self.world_size = self._world.Get_size()

    def refusal(self, op: ReduceOp, dtype: DType) -> str | None:
        if not is_legal(op, dtype):
            return f"{op.value} is not defined on {dtype.value}"
        if dtype in _NOT_IN_MPI:
            return f"MPI has no {dtype.value}"
        if op in (ReduceOp.AVG, ReduceOp.PREMUL_SUM):
            return f"MPI has no {op.value}"
        if dtype.kind == "complex" and op is not ReduceOp.SUM:
            return f"{op.value} of complex numbers is not examined"
        return None

    def tell(self, value: Any) -> list[Any]:
        told: list[Any] = self._world.allgather(value)
        return told

    def _open(self, order: Sequence[int], options: Options | None) -> Reducer:
        # MPI's rank and the order are one list, so a communicator with the members in this order can be made at once.
        group = self._world.Get_group().Incl(list(order))
        self._comm = self._world.Create_group(group)
        return MpiReducer(self._comm)

    def _close(self) -> None:
        self._comm.Free()

    def close(self) -> None:
        self._world.Barrier()
