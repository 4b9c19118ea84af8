# SPDX-License-Identifier: Apache-2.0
"""The short way of the calls made most: one that its caller waits for, run natively as a whole.

The long way, by a batch of requests and the group's worker, costs some 15 us of Python whatever is called. Here a call
is looked up by its tensors' types and sizes, and what it was lowered to when it last came is run on the caller's
thread, or issued to the current stream if its tensors are CUDA's. Both ways end in the same native call, so ranks need
not take the same one; whatever is out of the ordinary takes the long way, which also says what is wrong with it. Knows
nothing of how a call is run.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from detcomm import torch_calls
from detcomm.communicator import Communicator
from detcomm.errors import TransportError
from detcomm.lazy_communicator import LazyCommunicator
from detcomm.lazy_cuda import LazyCuda
from detcomm.tensor_memory import is_plain
from detcomm.torch_calls import Batch, operation_number
from detcomm.transports.base import PreparedCall
from detcomm.worker import Worker

if TYPE_CHECKING:
    from detcomm.cuda.direct_calls import CudaDirectCalls, KnownCall

_CACHED_CALLS = 1024
_NO_TIMEOUT = timedelta(milliseconds=-1)
"""What torch's options hold where the caller gave none."""


class _Known(NamedTuple):
    """A call that has come before: what it was lowered to, and who runs it."""

    call: PreparedCall
    communicator: Communicator


class DirectCalls:
    """One group's. Every method tells whether it has done the call; if not, nothing was sent.

    Attributes:
        alone: whether this is the only rank, and reductions leave every bit as it is.

    Args:
        worker: of the group, which keeps the order of its calls.
        blocks: the group's open blocks, by thread; while there are any, all calls take the long way.
        communicator: the group's; until it is connected, all calls take the long way.
        lost: makes the group unusable after an error of the transport; the error to raise.
        cuda: the half for CUDA tensors.
    """

    def __init__(
        self,
        world_size: int,
        worker: Worker,
        blocks: Mapping[int, object],
        communicator: LazyCommunicator | None,
        lost: Callable[[TransportError], TransportError],
        cuda: LazyCuda,
    ) -> None:
        self.alone = world_size == 1
        self._cuda: LazyCuda | None = cuda
        self.num_started = 0
        self.num_completed = 0
        self._world_size = world_size
        self._worker = worker
        self._blocks = blocks
        self._communicator = communicator
        self._lost = lost
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._closed = False

    def all_reduce(self, tensor: torch.Tensor, op: Any, timeout: timedelta | None, timeout_s: float) -> bool:
        """A tensor in place; ``op`` is torch's object, ``timeout`` the call's own, if any, before the group's."""
        if tensor.is_cuda:
            if (cuda := self._on_gpu()) is None or (on_gpu := cuda.find_all_reduce(tensor, op)) is None:
                return False
            return self._run_on_gpu(cuda, on_gpu, tensor, tensor, timeout, timeout_s)
        if not is_plain(tensor):
            return False
        key = (tensor.dtype, tensor.numel(), operation_number(op))
        known = self._known.get(key) or self._learn(key, lambda: torch_calls.all_reduce("all_reduce", [tensor], op))
        if known is None:
            return False
        address = tensor.data_ptr()
        return self._run(known, address, address, timeout, timeout_s)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: Any, timeout: timedelta, timeout_s: float
    ) -> bool:
        """Equal shards of one input."""
        if input.is_cuda:
            if (cuda := self._on_gpu()) is None or (on_gpu := cuda.find_reduce_scatter(output, input, op)) is None:
                return False
            return self._run_on_gpu(cuda, on_gpu, input, output, timeout, timeout_s)
        if not (is_plain(output) and is_plain(input)):
            return False
        key = (input.dtype, input.numel(), operation_number(op), output.dtype, output.numel())
        name = "reduce_scatter_tensor"
        known = self._known.get(key) or self._learn(
            key, lambda: torch_calls.reduce_scatter(name, [output], [input], op, self._world_size)
        )
        return known is not None and self._run_apart(known, input, output, timeout, timeout_s)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, timeout: timedelta, timeout_s: float) -> bool:
        """Equal shards of one output."""
        if input.is_cuda:
            if (cuda := self._on_gpu()) is None or (on_gpu := cuda.find_all_gather(output, input)) is None:
                return False
            return self._run_on_gpu(cuda, on_gpu, input, output, timeout, timeout_s)
        if not (is_plain(output) and is_plain(input)):
            return False
        key = (input.dtype, input.numel(), output.dtype, output.numel())
        name = "all_gather_into_tensor"
        known = self._known.get(key) or self._learn(
            key, lambda: torch_calls.all_gather(name, [output], [input], self._world_size)
        )
        return known is not None and self._run_apart(known, input, output, timeout, timeout_s)

    def close(self) -> None:
        """The group has failed or is destroyed: every call takes the long way, and is refused there."""
        self.alone = False
        self._closed = True
        self._known = {}
        self._cuda = None

    def _learn(self, key: tuple[Any, ...], batch: Callable[[], Batch]) -> _Known | None:
        communicator = None if self._communicator is None else self._communicator.made
        if communicator is None or self._closed:
            return None
        (request,) = batch().requests
        call = None if request.factor is not None else communicator.prepare_native(request.call, request.label)
        if call is None:
            return None
        if len(self._known) >= _CACHED_CALLS:
            self._known = {}
        known = self._known[key] = _Known(call, communicator)
        return known

    def _run_apart(
        self, known: _Known, input: torch.Tensor, output: torch.Tensor, timeout: timedelta, timeout_s: float
    ) -> bool:
        source, target = input.data_ptr(), output.data_ptr()
        offset = target - source
        if -output.nbytes < offset < input.nbytes and offset != known.call.in_place_offset:
            return False  # they overlap in some other way
        return self._run(known, source, target, timeout, timeout_s)

    def _run(self, known: _Known, source: int, target: int, timeout: timedelta | None, timeout_s: float) -> bool:
        if timeout is not None and timeout != _NO_TIMEOUT:
            timeout_s = _in_seconds(timeout, timeout_s)
        if self._blocks or not self._worker.try_begin():
            return False
        self.num_started += 1
        try:
            known.communicator.run_native(known.call, source, target, timeout_s)
        except TransportError as error:
            raise self._lost(error) from error
        finally:
            self.num_completed += 1
            self._worker.end()
        return True

    def _on_gpu(self) -> "CudaDirectCalls | None":
        return None if self._cuda is None or self._blocks else self._cuda.direct

    def _run_on_gpu(
        self,
        cuda: "CudaDirectCalls",
        known: "KnownCall",
        input: torch.Tensor,
        output: torch.Tensor,
        timeout: timedelta | None,
        timeout_s: float,
    ) -> bool:
        self.num_started += 1
        try:
            cuda.run(known, input.data_ptr(), output.data_ptr(), _in_seconds(timeout, timeout_s))
        except TransportError as error:
            raise self._lost(error) from error
        finally:
            self.num_completed += 1
        return True


def _in_seconds(timeout: timedelta | None, usual_s: float) -> float:
    """The call's own timeout before the group's."""
    if timeout is None or timeout == _NO_TIMEOUT or (own_s := timeout.total_seconds()) <= 0:
        return usual_s
    return own_s
