# SPDX-License-Identifier: Apache-2.0
"""The methods that torch calls on a backend, under their names of torch 2.11 to 2.14. Both forms inherit them.

Each checks its arguments, makes a batch of requests or posts a movement, and hands it to the group. Nothing else.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from detcomm import torch_calls
from detcomm.errors import UsageError
from detcomm.group import Group
from detcomm.outside_dynamo import outside_dynamo
from detcomm.sparse import all_reduce_sparse
from detcomm.work import FINISHED, FinishedWork

Tensors = Sequence[torch.Tensor]
_SUM = dist.ReduceOp.SUM


@outside_dynamo
class TorchMethods:
    """Collectives as torch calls them. ``opts`` is torch's options object of each, or absent."""

    _group: Group

    def allreduce(
        self, tensors: Tensors | torch.Tensor, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> dist.Work:
        if type(tensors) is not list and isinstance(tensors, torch.Tensor):  # torch's check takes 0.1 us
            tensors = [tensors]
        reduce_op, asynchronous, timeout = _reduce_settings(opts, op, timeout)
        direct = self._group.direct
        if (
            not asynchronous
            and len(tensors) == 1
            and not direct.alone
            and direct.all_reduce(tensors[0], reduce_op, timeout, self._group.timeout_s)
        ):
            return FINISHED
        if tensors[0].layout is not torch.strided:
            return all_reduce_sparse(self._group, tensors, reduce_op, timeout)
        if direct.alone and torch_calls.all_reduce_alone("all_reduce", tensors, reduce_op):
            return FinishedWork(list(tensors)) if asynchronous else FINISHED
        batch = torch_calls.all_reduce("all_reduce", tensors, reduce_op)
        return self._group.reduce("all_reduce", batch, asynchronous, timeout)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        reduce_op, asynchronous, timeout = _reduce_settings(opts)
        batch = torch_calls.all_reduce("all_reduce_coalesced", tensors, reduce_op)
        return self._group.reduce("all_reduce_coalesced", batch, asynchronous, timeout)

    def reduce(
        self,
        tensors: Tensors | torch.Tensor,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        if isinstance(opts, int):
            opts, root = None, opts
        tensor = tensors if isinstance(tensors, torch.Tensor) else _only("reduce", tensors)
        reduce_op, asynchronous, timeout = _reduce_settings(opts, op, timeout)
        destination = root if root is not None else (opts.rootRank if opts is not None else 0)
        batch = torch_calls.reduce(tensor, reduce_op, destination, self._group.rank)
        return self._group.reduce("reduce", batch, asynchronous, timeout)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        direct = self._group.direct if _waits(opts) else None
        if direct and direct.reduce_scatter(output, input, opts.reduceOp, opts.timeout, self._group.timeout_s):
            return FINISHED
        return self._reduce_scatter("reduce_scatter_tensor", [output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._reduce_scatter("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    def reduce_scatter(
        self,
        outputs: Tensors | torch.Tensor,
        inputs: Sequence[Any],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """One list of inputs and one output; or, in torch's short form, the list's tensors and the output."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        name = "reduce_scatter"
        parts = _only(name, inputs)
        reduce_op, asynchronous, timeout = _reduce_settings(opts, None, timeout)
        self._check_num(name, "input tensors", parts)
        batch = torch_calls.reduce_scatter_list(_only(name, outputs), parts, reduce_op, self._group.rank)
        return self._group.reduce(name, batch, asynchronous, timeout)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        direct = self._group.direct if _waits(opts) else None
        if direct and direct.all_gather(output, input, opts.timeout, self._group.timeout_s):
            return FINISHED
        return self._all_gather("all_gather_into_tensor", [output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._all_gather("all_gather_into_tensor_coalesced", outputs, inputs, opts)

    def allgather(
        self,
        outputs: Sequence[Any],
        inputs: Tensors | torch.Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """A list of outputs for each input; or, in torch's short form, the outputs and the input."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._all_gather_lists("all_gather", outputs, inputs, opts, timeout)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """``outputs[r][i]`` receives rank r's ``inputs[i]``: the other way round than ``allgather``'s."""
        self._check_num("all_gather_coalesced", "output lists", outputs)
        by_input = [[parts[index] for parts in outputs] for index in range(len(inputs))]
        return self._all_gather_lists("all_gather_coalesced", by_input, inputs, opts)

    def broadcast(
        self, tensors: Tensors | torch.Tensor, opts: Any = None, timeout: timedelta | None = None, *, root: int = 0
    ) -> dist.Work:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if opts is None or isinstance(opts, int):
            options = dist.BroadcastOptions()
            options.rootRank = root if opts is None else opts
            options.timeout = timeout or options.timeout
            opts = options
        self._group.check_usable()
        return self._group.move(self._group.movement_of(tensors).broadcast(tensors, opts), opts)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        self._group.check_usable()
        return self._group.move(self._group.movement_of(inputs).gather(outputs, inputs, opts), opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        self._group.check_usable()
        return self._group.move(self._group.movement_of(outputs).scatter(outputs, inputs, opts), opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        self._group.check_usable()
        opts = dist.AllToAllOptions() if opts is None else opts
        movement = self._group.movement_of([output])
        return self._group.move(movement.all_to_all_single(output, input, output_splits, input_splits, opts), opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        self._group.check_usable()
        opts = dist.AllToAllOptions() if opts is None else opts
        return self._group.move(self._group.movement_of(outputs).all_to_all(outputs, inputs, opts), opts)

    def send(self, tensors: Tensors, dst: int, tag: int) -> dist.Work:
        self._group.check_usable()
        return self._group.move_between_two(self._group.movement_of(tensors).send(tensors, dst, tag))

    def recv(self, tensors: Tensors, src: int, tag: int) -> dist.Work:
        self._group.check_usable()
        return self._group.move_between_two(self._group.movement_of(tensors).recv(tensors, src, tag))

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        self._group.check_usable()
        return self._group.move_between_two(self._group.movement_of(tensors).recv_anysource(tensors, tag))

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._group.barrier(dist.BarrierOptions() if opts is None else opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """As gloo's: rank 0 names the ranks that did not come."""
        limit = timedelta(seconds=self._group.timeout_s) if timeout is None else timeout
        self._group.monitored_barrier(limit, wait_all_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    def abort(self) -> None:
        self._group.abort()

    def shutdown(self) -> None:
        self._group.shutdown()

    def _get_sequence_number_for_group(self) -> int:
        return self._group.sequence

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: all ranks count from the creation of the group."""

    # The names of torch 2.11, and the deprecated ones that later releases still call.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single

    def _reduce_scatter(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        reduce_op, asynchronous, timeout = _reduce_settings(opts)
        batch = torch_calls.reduce_scatter(name, outputs, inputs, reduce_op, self._group.world_size)
        return self._group.reduce(name, batch, asynchronous, timeout)

    def _all_gather(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        batch = torch_calls.all_gather(name, outputs, inputs, self._group.world_size)
        return self._group.reduce(name, batch, *_settings(opts, None))

    def _all_gather_lists(
        self, name: str, outputs: Sequence[Tensors], inputs: Tensors, opts: Any, timeout: timedelta | None = None
    ) -> dist.Work:
        if len(outputs) != len(inputs):
            raise UsageError(f"{name}: expected {len(inputs)} output lists, got {len(outputs)}")
        for parts in outputs:
            self._check_num(name, "output tensors", parts)
        batch = torch_calls.all_gather_lists(outputs, inputs, self._group.rank)
        return self._group.reduce(name, batch, *_settings(opts, timeout))

    def _check_num(self, name: str, what: str, items: Sequence[Any]) -> None:
        if len(items) != self._group.world_size:
            raise UsageError(f"{name}: expected {self._group.world_size} {what}, one for each rank; got {len(items)}")


def _waits(opts: Any) -> bool:
    """Whether the caller goes on only when the call is done."""
    return opts is not None and not getattr(opts, "asyncOp", True)


def _settings(opts: Any, timeout: timedelta | None) -> tuple[bool, timedelta | None]:
    """Whether the caller goes on before the call is done, and the call's own timeout."""
    if opts is None:
        return True, timeout
    return getattr(opts, "asyncOp", True), opts.timeout


def _reduce_settings(opts: Any, op: Any = None, timeout: timedelta | None = None) -> tuple[Any, bool, timedelta | None]:
    """The same and the operation. In torch's short forms ``opts`` is the bare operation."""
    if opts is None:
        return _SUM if op is None else op, True, timeout
    try:
        return opts.reduceOp, opts.asyncOp, opts.timeout
    except AttributeError:
        return opts, True, timeout


def _only(name: str, items: Sequence[Any]) -> Any:
    if len(items) != 1:
        raise UsageError(f"{name}: expected one tensor or list of tensors, got {len(items)}")
    return items[0]
