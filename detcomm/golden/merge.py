# SPDX-License-Identifier: Apache-2.0
"""What the ranks hold becomes one digest for each whole tensor: parts are added, replicas are compared and count once.

The ranks tell each other what they hold when that changes, as objects; after that a step costs three small reductions
of int64, which have the same bits in any order and so on any backend. Knows neither models nor files.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist

from detcomm.errors import MismatchError, UsageError
from detcomm.golden.digest import MASK, Digest

Replicas = Literal["equal", "first"]
"""What it means that several ranks hold the same part: they must be equal, or the first rank's counts unseen."""

_RANKS_NAMED = 8
"""Ranks that an error names on each side."""


@attrs.frozen
class Part:
    """A part of a tensor, as a rank holds it.

    Attributes:
        kind: ``weights``, ``gradients``, …
        shape: of the whole tensor; ``None`` if unknown, and then nobody can tell whether a part is missing.
        place: equal on two ranks if they hold the same elements.
        size: in elements.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...] | None
    place: str
    size: int
    replicas: Replicas

    def __str__(self) -> str:
        return f"{self.kind} of {self.name} ({self.dtype}, {self.size} elements at {self.place})"


@attrs.frozen
class Whole:
    """A tensor's digest over all its parts."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...] | None
    num_parts: int
    digest: Digest


class Merger:
    """Merges the parts of all ranks of a group; called by all of them together, once a step.

    Args:
        group: ``None`` for a run without ``torch.distributed``.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self._device = torch.device("cpu") if group is None else _device_of(group)
        self._own: tuple[Part, ...] | None = None
        self._layout = _Layout([[]])

    def merge(self, step: int, parts: Sequence[Part], lanes: Sequence[Any], failure: str | None = None) -> list[Whole]:
        """The wholes, alike on every rank, in the order of the first rank that has them.

        Args:
            parts: what this rank holds.
            lanes: of each part: two numbers, or an int64 tensor of two.
            failure: why this rank cannot go on, so that all stop together. Seen at the first call alone.

        Raises:
            MismatchError: the ranks are at different steps; or replicas differ; or parts do not make up their whole.
            UsageError: some rank cannot go on.
        """
        own = tuple(parts)
        changed, latest, inverted = self._greatest([int(own != self._own), step, ~step])
        if latest != ~inverted:
            raise MismatchError(
                f"golden run: rank {self.rank} records step {step}, others steps {~inverted} to {latest}"
            )
        if changed:
            told = self._tell((own, failure))
            if failures := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text is not None]:
                raise UsageError(f"golden run: {'; '.join(failures[:_RANKS_NAMED])}")
            self._layout = _Layout([theirs for theirs, _ in told])
            self._own = own
        values = _stack(lanes, self._device)
        self._compare(step, own, values)
        totals = torch.zeros(len(self._layout.wholes), 2, dtype=torch.int64, device=self._device)
        counted = [(row, self._layout.whole_of(part)) for row, part in enumerate(own) if self._counts(part)]
        if counted:
            rows, wholes = (torch.tensor(column, device=self._device) for column in zip(*counted, strict=True))
            totals.index_add_(0, wholes, values[rows])
        if self.world_size > 1 and len(totals):
            dist.all_reduce(totals, dist.ReduceOp.SUM, group=self._group)
        digests = [Digest((first & MASK, second & MASK)) for first, second in totals.tolist()]
        return [attrs.evolve(whole, digest=each) for whole, each in zip(self._layout.wholes, digests, strict=True)]

    def _counts(self, part: Part) -> bool:
        return self._layout.holders[_key(part)][0] == self.rank

    def _compare(self, step: int, own: Sequence[Part], values: torch.Tensor) -> None:
        """Refuse replicas that differ: their greatest value is not their least."""
        rows = self._layout.compared
        if not rows:
            return
        mine = torch.full((len(rows), 4), torch.iinfo(torch.int64).min, dtype=torch.int64, device=self._device)
        held = [(row, rows[_key(part)]) for row, part in enumerate(own) if _key(part) in rows]
        if held:
            sources, targets = (torch.tensor(column, device=self._device) for column in zip(*held, strict=True))
            mine[targets] = torch.cat([values[sources], ~values[sources]], dim=1)  # greatest of ~x: ~ the least of x
        greatest = mine.clone()
        dist.all_reduce(greatest, dist.ReduceOp.MAX, group=self._group)
        differ = (greatest[:, :2] != ~greatest[:, 2:]).any(dim=1).nonzero().reshape(-1).tolist()
        if not differ:
            return
        told = self._tell(mine[differ[0], :2].tolist())
        part, ranks = self._layout.compared_parts[differ[0]]
        by_digest: dict[Digest, list[int]] = {}
        for rank in ranks:
            by_digest.setdefault(Digest((told[rank][0] & MASK, told[rank][1] & MASK)), []).append(rank)
        sides = "; ".join(f"{each} on {_ranks_text(having)}" for each, having in by_digest.items())
        more = f"; {len(differ) - 1} other parts differ too" if len(differ) > 1 else ""
        raise MismatchError(
            f"golden run, step {step}: replicas of {part} differ: {sides}{more}. "
            "If they are no replicas, give them names, offsets or indices of their own"
        )

    def _greatest(self, values: list[int]) -> list[int]:
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        greatest: list[int] = tensor.tolist()
        return greatest

    def _tell(self, own: Any) -> list[Any]:
        if self.world_size == 1:
            return [own]
        told: list[Any] = [None] * self.world_size
        dist.all_gather_object(told, own, group=self._group)
        return told


class _Layout:
    """Who holds what. A pure function of what all ranks have told."""

    def __init__(self, by_rank: Sequence[Sequence[Part]]) -> None:
        self.holders: dict[Hashable, list[int]] = {}
        by_key: dict[Hashable, Part] = {}
        names: dict[tuple[str, str], list[Part]] = {}
        for rank, parts in enumerate(by_rank):
            for part in parts:
                key = _key(part)
                if key not in by_key:
                    by_key[key] = part
                    names.setdefault((part.kind, part.name), []).append(part)
                self.holders.setdefault(key, []).append(rank)
        self.wholes = [self._whole(parts) for parts in names.values()]
        self._rows = {name: row for row, name in enumerate(names)}
        self.compared_parts = [
            (by_key[key], ranks)
            for key, ranks in self.holders.items()
            if len(ranks) > 1 and by_key[key].replicas == "equal"
        ]
        self.compared = {_key(part): row for row, (part, _) in enumerate(self.compared_parts)}

    def whole_of(self, part: Part) -> int:
        return self._rows[part.kind, part.name]

    def _whole(self, parts: Sequence[Part]) -> Whole:
        first = parts[0]
        for part in parts:
            if (part.dtype, part.shape) != (first.dtype, first.shape):
                here, there = self.holders[_key(first)][0], self.holders[_key(part)][0]
                raise MismatchError(
                    f"golden run: {first.kind} of {first.name}: rank {here} has {first.dtype} of shape {first.shape}, "
                    f"rank {there} {part.dtype} of shape {part.shape}"
                )
        if first.shape is not None:
            expected, held = torch.Size(first.shape).numel(), sum(part.size for part in parts)
            if expected != held:
                places = ", ".join(f"{part.size} at {part.place}" for part in parts[:_RANKS_NAMED])
                raise MismatchError(
                    f"golden run: {first.kind} of {first.name} has shape {first.shape}, {expected} elements; "
                    f"the ranks hold {held}: {places}"
                )
        return Whole(first.kind, first.name, first.dtype, first.shape, len(parts), Digest())


def _key(part: Part) -> Hashable:
    return part.kind, part.name, part.dtype, part.shape, part.place, part.size


def _stack(lanes: Sequence[Any], device: torch.device) -> torch.Tensor:
    """The lanes as rows on ``device``; all that lie on one device in one copy."""
    result = torch.zeros(len(lanes), 2, dtype=torch.int64)
    on_device: dict[torch.device, list[int]] = {}
    for row, lane in enumerate(lanes):
        if isinstance(lane, torch.Tensor):
            on_device.setdefault(lane.device, []).append(row)
        else:
            result[row] = torch.tensor([number - (1 << 64) if number >> 63 else number for number in lane])
    for rows in on_device.values():
        result[rows] = torch.stack([lanes[row] for row in rows]).cpu()
    return result.to(device)


def _device_of(group: dist.ProcessGroup) -> torch.device:
    devices = {device.type for device in group._device_types}
    return (
        torch.device("cpu")
        if "cpu" in devices
        else torch.device(devices.pop(), torch.accelerator.current_device_index())
    )


def _ranks_text(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:_RANKS_NAMED]))
    more = f" and {len(ranks) - _RANKS_NAMED} more" if len(ranks) > _RANKS_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"
