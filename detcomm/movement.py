# SPDX-License-Identifier: Apache-2.0
"""Data movement without arithmetic goes to a stock gloo group of torch, tensor by tensor as plain bytes.

As bytes, since gloo knows neither float8 nor uint16 nor complex, and every bit stays. The inner group is made when
the group is: made at first use it would deadlock, since only two ranks call send and receive.

Everything is checked here, before anything is sent; who posts it, and when, is not said here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from detcomm import movement_call, stock_gloo
from detcomm.errors import TransportError, UsageError
from detcomm.movement_call import MovementCall
from detcomm.movement_waits import MovementWaits
from detcomm.movement_work import Lost, transport_error
from detcomm.splits import Splits
from detcomm.tensor_memory import check_dense


class Posting(NamedTuple):
    """A movement that has been checked, ready to be posted.

    Attributes:
        label: what it is, for error texts.
        post: posts it to the stock group; gives that group's work.
        results: what its future holds.
        call: what all ranks must agree on before; ``None`` where two ranks alone take part, or nobody asks.
        splits: of an all-to-all, which must fit those of the other ranks.
        finish: run once, when the bytes are there.
        on_gpu: whether a stock NCCL group moves it.
        waits: through which the stock group's work is waited for.
    """

    label: str
    post: Callable[[], Any]
    results: list[torch.Tensor]
    call: MovementCall | None = None
    splits: Splits | None = None
    finish: Callable[[], None] | None = None
    on_gpu: bool = False
    waits: MovementWaits | None = None


class Movement:
    """The inner group, with the methods of torch's process groups, each of which gives a ``Posting``.

    Args:
        inner: a connected ``ProcessGroupGloo``, owned from now on.
    """

    def __init__(self, inner: Any, lost: Lost) -> None:
        self.inner = inner
        self._lost = lost
        self._waits = MovementWaits("detcomm-movement", inner)
        self._rank: int = inner.rank()
        self._world_size: int = inner.size()

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> Posting:
        name = movement_call.BROADCAST
        if len(tensors) != 1:
            raise UsageError(f"{name}: expected one tensor, got {len(tensors)}")
        call = self._rooted_call(name, tensors[0], opts.rootRank)
        return self._posting(name, name, [bytes_of(name, tensors), opts], tensors, call)

    def gather(self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any) -> Posting:
        name = movement_call.GATHER
        parts = self._parts_on_root(name, outputs, inputs, opts.rootRank)
        call = self._rooted_call(name, inputs[0], opts.rootRank)
        args = [[bytes_of(name, parts)] if parts else [], bytes_of(name, inputs), opts]
        return self._posting(name, name, args, parts, call)

    def scatter(self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any) -> Posting:
        name = movement_call.SCATTER
        parts = self._parts_on_root(name, inputs, outputs, opts.rootRank)
        call = self._rooted_call(name, outputs[0], opts.rootRank)
        args = [bytes_of(name, outputs), [bytes_of(name, parts)] if parts else [], opts]
        return self._posting(name, name, args, outputs, call)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any,
    ) -> Posting:
        """Splits count rows, as in torch; empty for equal ones."""
        name = "all_to_all_single"
        if output.dtype is not input.dtype:
            raise UsageError(f"{name}: the output is {output.dtype}, the input {input.dtype}")
        memory = bytes_of(name, [output, input])
        received = self._splits_in_bytes(name, output, output_splits)
        sent = self._splits_in_bytes(name, input, input_splits)
        call = MovementCall(movement_call.ALL_TO_ALL, _dtype_name(input))
        args = [*memory, received, sent, opts]
        return self._posting(name, "alltoall_base", args, [output], call, Splits(sent, received))

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any) -> Posting:
        """One tensor to and from each rank, of any sizes; through one message buffer each way."""
        name = movement_call.ALL_TO_ALL
        call = self._list_call(name, outputs, inputs)
        received_parts, sent_parts = bytes_of(name, outputs), bytes_of(name, inputs)
        splits = Splits([part.numel() for part in sent_parts], [part.numel() for part in received_parts])
        received = torch.empty(sum(splits.received), dtype=torch.uint8)

        def finish() -> None:
            start = 0
            for part in received_parts:
                part.copy_(received[start : start + part.numel()])
                start += part.numel()

        args = [received, torch.cat(sent_parts), splits.received, splits.sent, opts]
        return self._posting(name, "alltoall_base", args, outputs, call, splits, finish)

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int) -> Posting:
        return self._posting(f"send to rank {dst}", "send", [bytes_of("send", tensors), dst, tag], tensors)

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int) -> Posting:
        return self._posting(f"recv from rank {src}", "recv", [bytes_of("recv", tensors), src, tag], tensors)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> Posting:
        return self._posting("recv from any rank", "recv_anysource", [bytes_of("recv", tensors), tag], tensors)

    def barrier(self, opts: Any) -> Posting:
        name = movement_call.BARRIER
        return self._posting(name, name, [opts], [], MovementCall(name))

    def stock(self, label: str, call: Callable[[], Any], results: Sequence[torch.Tensor]) -> Posting:
        """A collective of the inner group as it is, arithmetic in the stock library's order included.

        Args:
            call: issues it to the inner group and gives its work.
            results: where its results will be, for those who ask the work for them.
        """
        return Posting(label, partial(self._guarded, label, call), list(results), waits=self._waits)

    def abort(self, error: TransportError) -> None:
        """Wake every thread that waits in the inner group."""
        stock_gloo.unblock(self.inner)
        self._waits.end(error)  # those that gloo does not tell

    def close(self) -> None:
        """Let go of the inner group. Idempotent."""
        self.inner = None
        self._waits.close()

    def _posting(
        self,
        label: str,
        method: str,
        args: list[Any],
        results: Sequence[torch.Tensor],
        call: MovementCall | None = None,
        splits: Splits | None = None,
        finish: Callable[[], None] | None = None,
    ) -> Posting:
        post = partial(self._call, label, method, args)
        return Posting(label, post, list(results), call, splits, finish, waits=self._waits)

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

    def _rooted_call(self, name: str, tensor: torch.Tensor, root: int) -> MovementCall:
        if not 0 <= root < self._world_size:
            raise UsageError(f"{name}: expected a root below {self._world_size}, got {root}")
        return MovementCall(name, _dtype_name(tensor), tensor.numel(), root)

    def _list_call(self, name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> MovementCall:
        """One type, and one tensor for each rank."""
        if not len(outputs) == len(inputs) == self._world_size:
            got = f"{len(outputs)}, {len(inputs)}"
            raise UsageError(f"{name}: expected {self._world_size} outputs and inputs, got {got}")
        for tensor in (*outputs, *inputs):
            if tensor.dtype is not inputs[0].dtype:
                raise UsageError(f"{name}: the tensors' types differ: {inputs[0].dtype} and {tensor.dtype}")
        return MovementCall(name, _dtype_name(inputs[0]))

    def _parts_on_root(
        self, name: str, lists: Sequence[Sequence[torch.Tensor]], own: Sequence[torch.Tensor], root: int
    ) -> Sequence[torch.Tensor]:
        """The root's tensors, one for each rank and all like its own; none on the other ranks."""
        if len(own) != 1:
            raise UsageError(f"{name}: expected one tensor, got {len(own)}")
        parts = [part for parts in lists for part in parts]
        expected = self._world_size if self._rank == root else 0
        if len(parts) != expected or len(lists) > 1:
            raise UsageError(f"{name}: rank {self._rank}, root {root}: expected {expected} tensors, got {len(parts)}")
        for part in parts:
            if part.dtype is not own[0].dtype or part.numel() != own[0].numel():
                like = f"{_dtype_name(own[0])}[{own[0].numel()}]"
                raise UsageError(f"{name}: expected tensors like {like}, got {_dtype_name(part)}[{part.numel()}]")
        return parts

    def _splits_in_bytes(self, name: str, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
        num_rows = tensor.size(0) if tensor.dim() else 1
        splits = [int(split) for split in splits]  # stock groups take NumPy's arrays too, and Megatron gives them
        if not splits:
            if num_rows % self._world_size:
                raise UsageError(f"{name}: {num_rows} rows do not divide evenly over {self._world_size} ranks")
            splits = [num_rows // self._world_size] * self._world_size
        if len(splits) != self._world_size or sum(splits) != num_rows or min(splits) < 0:
            raise UsageError(f"{name}: expected {self._world_size} splits of {num_rows} rows, got {splits}")
        row_bytes = tensor.numel() * tensor.element_size() // max(num_rows, 1)
        return [split * row_bytes for split in splits]


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


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
