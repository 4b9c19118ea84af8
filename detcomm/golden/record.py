# SPDX-License-Identifier: Apache-2.0
"""The recorder: a few lines in a training loop that write down what was computed, as hashes, step by step.

    with detcomm.golden.Recorder("run.golden", config={"seed": 1}) as run:
        ...
        run.step(step, loss=loss, model=model, optimizer=optimizer)

One rank or many, any backend: replicas are compared and count once, shards are added. Rank 0 writes. A recorder without
a path, in a process that ``detcomm golden record`` has not started, does nothing.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from detcomm.errors import UnsupportedError, UsageError
from detcomm.golden import contents, environment
from detcomm.golden.file import DETAILS, FILE_VARIABLE, Detail, Step, Tensor, Writer, summarise
from detcomm.golden.merge import Merger, Part, Replicas, Whole
from detcomm.golden.positions import Run
from detcomm.golden.tensors import device_lanes, locate

KINDS = ("loss", "gradients", "optimizer", "weights")
"""In the order in which a step computes them; a difference is reported at the first. Other kinds come before."""

_commanded: set[str] = set()
"""Files of ``FILE_VARIABLE`` that a recorder of this process has begun: a second one would write over it."""

_LOSS_BITS = "loss bits"


class Recorder:
    """Records a run. A context: the file gets its name when the block ends without an error.

    Args:
        path: of the file; without one, and without ``DETCOMM_GOLDEN_FILE``, nothing is recorded.
        config: what else decides the run, as JSON: seed, batch size. Kept in the file; differences are shown.
        detail: ``tensors`` keeps a digest of each tensor; ``summary`` one of each kind, for large models.
        replicas: ``equal``: ranks that hold the same part of a tensor must hold the same bits, or all ranks get an
            error; ``first``: the first such rank is believed.
        group: the ranks of the run; default: the default group, if there is one at the first step.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        detail: Detail = "tensors",
        replicas: Replicas = "equal",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if detail not in DETAILS:
            raise UsageError(f"detail: expected one of {', '.join(DETAILS)}, got {detail!r}")
        _check_replicas(replicas)
        self._commanded = os.environ.get(FILE_VARIABLE)
        given = self._commanded or path
        self._path = None if given is None else Path(given)
        self._config = dict(config or {})
        self._detail: Detail = detail
        self._replicas: Replicas = replicas
        self._group = group
        self._merger: Merger | None = None
        self._writer: Writer | None = None
        self._parts: dict[Part, Any] = {}
        self._devices: set[torch.device] = set()
        self._last_step: int | None = None

    @property
    def enabled(self) -> bool:
        """Whether anything is recorded: a path was given."""
        return self._path is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(ended_well=kind is None)

    def close(self, *, ended_well: bool = True) -> None:
        """End the file; what was recorded before an error stays under the name ``<path>.partial``. Idempotent."""
        if self._writer is not None:
            self._writer.close(ended_well=ended_well)

    def add(
        self,
        kind: str,
        name: str,
        tensor: Any,
        *,
        offset: int = 0,
        indices: Any = None,
        shape: tuple[int, ...] | None = None,
        replicas: Replicas | Literal["none"] | None = None,
    ) -> None:
        """Hash a tensor, or the part of one that this rank holds, for the next ``step``. Not collective.

        For what ``step`` does not find by itself: the shards of a distributed optimizer, gradients before clipping.

        Args:
            kind: ``weights``, ``gradients``, ``optimizer``, or another word.
            name: of the whole tensor, the same on all ranks that hold a part of it.
            tensor: a torch tensor, DTensor, NumPy array or number.
            offset: where in the flattened whole the part begins, in elements.
            indices: for a part that is no contiguous run; see ``digest``.
            shape: of the whole; with it, parts that are missing are an error.
            replicas: as for the recorder, whose word is the default; ``none``: each rank's tensor is one of its own,
                whose name gets ``@<rank>``.

        Raises:
            UsageError: the same part twice in a step, or a wrong argument.
            UnsupportedError: a tensor whose bits are not specified.
        """
        if not self.enabled:
            return
        if replicas not in (None, "none"):
            _check_replicas(replicas)
        values = tensor if isinstance(tensor, torch.Tensor) else torch.from_numpy(np.array(tensor))
        try:
            local, place = locate(values, offset, indices)
        except (UnsupportedError, UsageError) as error:
            raise type(error)(f"golden run: {kind} of {name}: {error}") from None
        if isinstance(values, DTensor):
            shape = tuple(values.shape)
        if replicas == "none":
            name, replicas = f"{name}@{self._rank()}", "first"
        part = Part(
            kind=kind,
            name=name,
            dtype=str(values.dtype).removeprefix("torch."),
            shape=None if shape is None else tuple(shape),
            place=place.text,
            size=local.numel(),
            replicas=replicas or self._replicas,
        )
        if part in self._parts:
            raise UsageError(f"golden run: {part}: a second time in one step")
        self._parts[part] = device_lanes(local, place)
        self._devices.add(local.device)

    def step(
        self,
        step: int,
        *,
        loss: Any = None,
        model: contents.Model | None = None,
        optimizer: contents.Optimizer | None = None,
    ) -> None:
        """Record a step: what was added since the last one, and what is given here. All ranks of the run call it.

        Call it after the optimizer's step and before gradients are cleared.

        Args:
            step: its number, greater than the last one's and equal on all ranks.
            loss: this rank's, a number or a tensor of one element; each rank's counts.
            model: a module, or parameters by name: its weights, and the gradients that are there.
            optimizer: an optimizer, or its state by name.

        Raises:
            MismatchError: replicas differ (names tensor and ranks), parts are missing, or ranks are at different steps.
            UsageError: a wrong argument, or a file that cannot be written.
        """
        if not self.enabled:
            return
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise UsageError(f"step: expected a whole number of at least 0, got {step!r}")
        if self._last_step is not None and step <= self._last_step:
            raise UsageError(f"step: expected a number greater than {self._last_step}, got {step}")
        merger = self._merger = self._merger or Merger(self._running_group())
        if loss is not None:
            self._add_loss(loss)
        if model is not None:
            for name, gradient in contents.gradients(model).items():
                self.add("gradients", name, gradient, shape=tuple(gradient.shape))
        if optimizer is not None:
            for name, value in contents.state(optimizer, model):
                self.add("optimizer", name, value, shape=tuple(value.shape))
        if model is not None:
            for name, weight in contents.parameters(model).items():
                self.add("weights", name, weight, shape=tuple(weight.shape))
        failure = self._open() if self._last_step is None and merger.rank == 0 else None
        parts, self._parts = self._parts, {}
        wholes = merger.merge(step, list(parts), list(parts.values()), failure)
        self._last_step = step
        if self._writer is not None:
            self._writer.write(_to_step(step, wholes))

    def _add_loss(self, loss: Any) -> None:
        value = loss.detach() if isinstance(loss, torch.Tensor) else torch.from_numpy(np.array(loss))
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if value.numel() != 1 or value.element_size() > 8:
            raise UsageError(f"loss: expected one number, got {value.dtype} of shape {tuple(value.shape)}")
        value = value.reshape(1).cpu()
        rank = self._rank()
        self.add("loss", "loss", value, offset=rank)
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
        part = Part(_LOSS_BITS, "loss", str(value.dtype).removeprefix("torch."), None, Run().text, 1, "first")
        self._parts[part] = (int(value.view(words).item()) & ((1 << 8 * value.element_size()) - 1), 0)

    def _running_group(self) -> dist.ProcessGroup | None:
        if self._group is not None or not (dist.is_available() and dist.is_initialized()):
            return self._group
        return dist.group.WORLD

    def _rank(self) -> int:
        if self._merger is not None:
            return self._merger.rank
        group = self._running_group()
        return 0 if group is None else dist.get_rank(group)

    def _open(self) -> str | None:
        """Begin the file; why it cannot be begun, for the other ranks."""
        assert self._path is not None
        if self._commanded is not None and self._commanded in _commanded:
            return f"{FILE_VARIABLE}: a second recorder would write over {self._path}"
        try:
            described = environment.describe(self._running_group(), self._devices)
            self._writer = Writer(self._path, self._detail, described, self._config)
        except UsageError as error:
            return str(error)
        if self._commanded is not None:
            _commanded.add(self._commanded)
        return None


def _to_step(step: int, wholes: list[Whole]) -> Step:
    """What the file keeps of a step, kinds in the order in which they are computed."""
    order = {kind: number for number, kind in enumerate(KINDS)}
    by_kind: dict[str, dict[str, Tensor]] = {}
    loss: dict[str, Any] | None = None
    bits: tuple[int, str] | None = None
    for whole in sorted(wholes, key=lambda whole: order.get(whole.kind, -1)):
        if whole.kind == _LOSS_BITS:
            bits = whole.digest.lanes[0], whole.dtype
        elif whole.kind == "loss":
            loss = {"ranks": whole.num_parts, "digest": str(whole.digest)}
        else:
            by_kind.setdefault(whole.kind, {})[whole.name] = Tensor(whole.dtype, whole.shape, str(whole.digest))
    if loss is not None and bits is not None:
        loss = _readable(*bits) | loss
    tensors = {(kind, name): tensor for kind, named in by_kind.items() for name, tensor in named.items()}
    return Step(step, loss, {kind: summarise(named) for kind, named in by_kind.items()}, tensors)


def _readable(bits: int, dtype: str) -> dict[str, Any]:
    """The loss of the first rank that has one."""
    kind: torch.dtype = getattr(torch, dtype)
    value = torch.from_numpy(np.array([bits], dtype=f"u{kind.itemsize}")).view(kind).item()
    return {"dtype": dtype, "bits": f"0x{bits:0{2 * kind.itemsize}x}", "decimal": repr(value)}


def _check_replicas(replicas: Any) -> None:
    if replicas not in ("equal", "first"):
        raise UsageError(f"replicas: expected equal or first, got {replicas!r}")
