# SPDX-License-Identifier: Apache-2.0
"""Data movement without arithmetic goes to a stock gloo group of torch, tensor by tensor as plain bytes.

As bytes, since gloo knows neither float8 nor uint16 nor complex, and every bit stays. The inner group is made when
the group is: made at first use it would deadlock, since only two ranks call send and receive.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from detcomm import stock_gloo
from detcomm.errors import PeerTimeoutError, TransportError, UsageError
from detcomm.tensor_memory import check_dense

Lost = Callable[[TransportError], TransportError]
"""Told that the inner group has failed; gives the error to raise, which may name the first cause."""

_TIMEOUT_TEXTS = ("Timed out", "timed out", "timeout")


class MovementWork(dist.Work):
    """A work of the inner group, whose errors become ours.

    Args:
        label: what it is, for error texts.
        finish: run once, when the bytes are there.
    """

    def __init__(
        self,
        label: str,
        inner: Any,
        results: list[torch.Tensor],
        lost: Lost,
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._label = label
        self._inner = inner
        self._results = results
        self._lost = lost
        self._finish = finish
        self._finishing = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the bytes are there; at most for ``timeout``, or the group's.

        Raises:
            TransportError, PeerTimeoutError: the group is unusable afterwards.
        """
        try:
            self._inner.wait(timeout) if timeout else self._inner.wait()
        except RuntimeError as error:
            raise self._lost(transport_error(self._label, error)) from error
        self._finish_once()
        return True

    def is_completed(self) -> bool:
        if not self._inner.is_completed():
            return False
        if self._inner.is_success():
            self._finish_once()
        return True

    def is_success(self) -> bool:
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        return self._inner.exception()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._results

    def get_future(self) -> Any:
        """As gloo: for collectives alone, not for send and receive."""
        return self._inner.get_future().then(self._unwrap)

    def source_rank(self) -> int:
        return int(self._inner._source_rank())

    def _source_rank(self) -> int:
        return self.source_rank()

    def _unwrap(self, future: Any) -> list[torch.Tensor]:
        future.value()
        self._finish_once()
        return self._results

    def _finish_once(self) -> None:
        with self._finishing:
            if self._finish is not None:
                self._finish()
                self._finish = None


class Movement:
    """The inner group, with the methods of torch's process groups.

    Args:
        inner: a connected ``ProcessGroupGloo``, owned from now on.
    """

    def __init__(self, inner: Any, lost: Lost) -> None:
        self.inner = inner
        self._lost = lost

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> dist.Work:
        return self._post("broadcast", "broadcast", [bytes_of("broadcast", tensors)], tensors, opts)

    def gather(self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any) -> dist.Work:
        args = [[bytes_of("gather", parts) for parts in outputs], bytes_of("gather", inputs)]
        return self._post("gather", "gather", args, [part for parts in outputs for part in parts], opts)

    def scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any
    ) -> dist.Work:
        args = [bytes_of("scatter", outputs), [bytes_of("scatter", parts) for parts in inputs]]
        return self._post("scatter", "scatter", args, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any,
    ) -> dist.Work:
        """Splits count rows, as in torch; empty for equal ones."""
        name = "all_to_all_single"
        if output.dtype is not input.dtype:
            raise UsageError(f"{name}: the output is {output.dtype}, the input {input.dtype}")
        args = [
            *bytes_of(name, [output, input]),
            self._splits_in_bytes(name, output, output_splits),
            self._splits_in_bytes(name, input, input_splits),
        ]
        return self._post(name, "alltoall_base", args, [output], opts)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any) -> dist.Work:
        """One tensor to and from each rank, of any sizes; through one message buffer each way."""
        name = "all_to_all"
        world_size = self.inner.size()
        if not len(outputs) == len(inputs) == world_size:
            raise UsageError(f"{name}: expected {world_size} outputs and inputs, got {len(outputs)}, {len(inputs)}")
        received_parts, sent_parts = bytes_of(name, outputs), bytes_of(name, inputs)
        sent = torch.cat(sent_parts)
        output_sizes = [part.numel() for part in received_parts]
        received = torch.empty(sum(output_sizes), dtype=torch.uint8)

        def finish() -> None:
            start = 0
            for part in received_parts:
                part.copy_(received[start : start + part.numel()])
                start += part.numel()

        args = [received, sent, output_sizes, [part.numel() for part in sent_parts]]
        return self._post(name, "alltoall_base", args, outputs, opts, finish)

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int) -> dist.Work:
        return self._post(f"send to rank {dst}", "send", [bytes_of("send", tensors), dst, tag], tensors)

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int) -> dist.Work:
        return self._post(f"recv from rank {src}", "recv", [bytes_of("recv", tensors), src, tag], tensors)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> dist.Work:
        return self._post("recv from any rank", "recv_anysource", [bytes_of("recv", tensors), tag], tensors)

    def issue_stock(self, label: str, call: Callable[[], Any], results: Sequence[torch.Tensor]) -> dist.Work:
        """A collective of the inner group as it is, arithmetic in the stock library's order included.

        Args:
            call: issues it to the inner group and gives its work.
            results: where its results will be, for those who ask the work for them.
        """
        return MovementWork(label, self._guarded(label, call), list(results), self._lost)

    def barrier(self, opts: Any) -> None:
        """Return when every rank has come."""
        MovementWork("barrier", self._call("barrier", "barrier", [opts]), [], self._lost).wait()

    def abort(self) -> None:
        """Wake every thread that waits in the inner group."""
        stock_gloo.unblock(self.inner)

    def close(self) -> None:
        """Let go of the inner group. Idempotent."""
        self.inner = None

    def _post(
        self,
        label: str,
        method: str,
        args: list[Any],
        results: Sequence[torch.Tensor],
        opts: Any = None,
        finish: Callable[[], None] | None = None,
    ) -> dist.Work:
        inner = self._call(label, method, args if opts is None else [*args, opts])
        return MovementWork(label, inner, list(results), self._lost, finish)

    def _call(self, label: str, method: str, args: list[Any]) -> Any:
        if self.inner is None:
            raise UsageError(f"{label}: the group has been destroyed")
        return self._guarded(label, partial(getattr(self.inner, method), *args))

    def _guarded(self, label: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except ValueError as error:  # gloo's checks of its arguments
            raise UsageError(f"{label}: {error}") from error
        except RuntimeError as error:
            raise self._lost(transport_error(label, error)) from error

    def _splits_in_bytes(self, name: str, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
        world_size = self.inner.size() if self.inner is not None else 1
        num_rows = tensor.size(0) if tensor.dim() else 1
        splits = [int(split) for split in splits]  # stock groups take NumPy's arrays too, and Megatron gives them
        if not splits:
            if num_rows % world_size:
                raise UsageError(f"{name}: {num_rows} rows do not divide evenly over {world_size} ranks")
            splits = [num_rows // world_size] * world_size
        if len(splits) != world_size or sum(splits) != num_rows:
            raise UsageError(f"{name}: expected {world_size} splits of {num_rows} rows, got {splits}")
        row_bytes = tensor.numel() * tensor.element_size() // max(num_rows, 1)
        return [split * row_bytes for split in splits]


def process_group_around(inner: Any, device: str, store: Any) -> Any:
    """A plain process group of torch around a stock backend: it has the methods of every kind of call.

    A backend alone lacks some in Python, the coalesced ones of gloo for instance. Holds ``inner`` while it lives.
    """
    kinds = dist.ProcessGroup.BackendType
    kind = kinds.NCCL if device == "cuda" else kinds.GLOO
    stock: Any = dist.ProcessGroup(store, inner.rank(), inner.size())
    stock._set_default_backend(kind)
    stock._register_backend(torch.device(device), kind, inner)
    return stock


def transport_error(label: str, error: RuntimeError) -> TransportError:
    """What gloo says, as one of our errors."""
    text = str(error).partition("\n")[0]
    kind = PeerTimeoutError if any(word in text for word in _TIMEOUT_TEXTS) else TransportError
    return kind(f"{label}: {text}")


def bytes_of(name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The memory of each tensor as a flat tensor of bytes.

    Raises:
        UnsupportedError, UsageError: not one run of memory.
    """
    flat = []
    for tensor in tensors:
        check_dense(name, tensor)
        tensor = tensor.detach()
        flat.append(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8))
    return flat
