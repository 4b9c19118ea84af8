# SPDX-License-Identifier: Apache-2.0
"""One probing: measure, rebuild the trees, confirm them on random numbers, compare them with a promise."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from detcomm.association import Association, Expr, to_text
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.contributions import near_contribution
from detcomm.errors import UsageError
from detcomm.probing.replay import equal_elements, evaluate, models
from detcomm.probing.sizes import DTYPES, MAX_WORLD_SIZE, Sizes, held_elements, measure
from detcomm.probing.tree import NotATree, canonical, rebuild
from detcomm.reducers import Examined, Reducer
from detcomm.reducers.base import spoken
from detcomm.transports.base import Bytes

_REPLAYED_ELEMS = 256
"""Random elements that must agree, however few a message has."""


@dataclass(frozen=True)
class Range:
    """Consecutive elements with one tree.

    Attributes:
        tree: in canonical form; ``None`` if no binary tree explains what was measured, and ``problem`` says why.
    """

    start: int
    stop: int
    tree: Expr | None
    problem: str = ""

    @property
    def text(self) -> str:
        """``((0+1)+2)``, or what is wrong."""
        return self.problem if self.tree is None else to_text(self.tree)


@dataclass(frozen=True)
class Probed:
    """What was found about one collective, type and size.

    Attributes:
        reproduced: for each model of precision, how many of ``replayed`` random elements the trees give bit by bit.
        ranks_agree: whether all ranks received the same bits.
        repeats: whether the random reduction gave the same bits twice.
    """

    collective: Collective
    dtype: DType
    count: int
    world_size: int
    ranges: tuple[Range, ...]
    replayed: int
    reproduced: dict[str, int]
    ranks_agree: bool
    repeats: bool

    @property
    def precision(self) -> str | None:
        """The model of precision that explains every bit, if one does."""
        explains = [model for model, number in self.reproduced.items() if number == self.replayed]
        return " or ".join(explains) or None

    @property
    def explained(self) -> bool:
        """Whether the trees and one model of precision account for every bit of every element."""
        return self.precision is not None and self.ranks_agree and self.repeats

    def breaches(self, promised: Association) -> Iterator[str]:
        """Where the trees are not the promised ones."""
        for found in self.ranges:
            for start, stop, element_class in _promised_classes(promised, self, found):
                expected = canonical(promised.tree(self.world_size, element_class))
                if found.tree != expected:
                    yield f"[{start},{stop}): expected {to_text(expected)}, got {found.text}"

    def to_json(self) -> dict[str, Any]:
        """All of it, for other programs."""
        return {
            "collective": self.collective.value,
            "dtype": self.dtype.value,
            "count": self.count,
            "world_size": self.world_size,
            "ranges": [
                {"start": found.start, "stop": found.stop}
                | ({"tree": found.text} if found.tree is not None else {"problem": found.problem})
                for found in self.ranges
            ],
            "replayed_elements": self.replayed,
            "reproduced_elements": self.reproduced,
            "precision": self.precision,
            "ranks_agree": self.ranks_agree,
            "repeats": self.repeats,
        }


def probe(
    examined: Examined,
    reducer: Reducer,
    collective: Collective,
    dtype: DType,
    count: int,
    *,
    root: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> Probed:
    """Find the trees. Every rank calls this, and every rank gets the answer.

    Args:
        reducer: a group of all ranks of the examination, in order.
        count: elements of the whole message.
        advance: called after each of the ``N (N-1) / 2`` reductions.

    Raises:
        UsageError: a type, size or world size that cannot be probed.
    """
    check_can_probe(reducer.world_size, collective, dtype, count)
    own = measure(reducer, collective, dtype, count, root, advance)
    told: list[Sizes] = examined.tell(own)
    holders = _holders(collective, reducer.world_size, root)
    ranks_agree = collective is not Collective.ALL_REDUCE or len({sizes.digest for sizes in told}) == 1
    ranges: tuple[Range, ...] = spoken(
        examined, _to_ranges([told[rank] for rank in holders], reducer.world_size) if examined.rank == 0 else None
    )
    reproduced, digests = _confirm(reducer, collective, dtype, count, root, ranges, reducer.rank in holders)
    outcomes = examined.tell((reproduced, digests))
    return Probed(
        collective=collective,
        dtype=dtype,
        count=count,
        world_size=reducer.world_size,
        ranges=ranges,
        replayed=count * num_replays(count),
        reproduced={model: sum(outcome[0][model] for outcome in outcomes) for model in models(dtype)},
        ranks_agree=ranks_agree
        and (collective is not Collective.ALL_REDUCE or len({outcome[1][0] for outcome in outcomes}) == 1),
        repeats=all(first == second for _, (first, second) in outcomes),
    )


def check_can_probe(world_size: int, collective: Collective, dtype: DType, count: int) -> None:
    """Refuse what cannot be probed.

    Raises:
        UsageError: saying what and why.
    """
    if not collective.reduces:
        raise UsageError(f"{collective.value} adds nothing")
    if dtype not in DTYPES:
        raise UsageError(
            f"a type to probe: expected one of {', '.join(each.value for each in DTYPES)}, got {dtype.value}"
        )
    if not 2 <= world_size <= MAX_WORLD_SIZE:
        raise UsageError(f"a probe needs 2 to {MAX_WORLD_SIZE} ranks, got {world_size}")
    if count < 1:
        raise UsageError(f"a probe needs at least one element, got {count}")
    if collective is Collective.REDUCE_SCATTER and count % world_size:
        raise UsageError(f"reduce_scatter: {count} elements do not divide evenly over {world_size} ranks")


def _holders(collective: Collective, world_size: int, root: int) -> Sequence[int]:
    """The ranks whose elements make up the whole message once."""
    if collective is Collective.REDUCE_SCATTER:
        return range(world_size)
    return (root if collective is Collective.REDUCE else 0,)


def _to_ranges(parts: Sequence[Sizes], world_size: int) -> tuple[Range, ...]:
    known: dict[tuple[int, ...], tuple[Expr | None, str]] = {}
    ranges: list[Range] = []
    for part in parts:
        for start, stop, sizes in part.runs():
            key = tuple(sizes.values())
            if key not in known:
                try:
                    known[key] = (rebuild(world_size, sizes), "")
                except NotATree as error:
                    known[key] = (None, f"no binary tree, or more than one rounding: {error}")
            tree, problem = known[key]
            if ranges and (ranges[-1].tree, ranges[-1].problem) == (tree, problem):
                start = ranges.pop().start
            ranges.append(Range(start, stop, tree, problem))
    return tuple(ranges)


def _confirm(
    reducer: Reducer,
    collective: Collective,
    dtype: DType,
    count: int,
    root: int,
    ranges: Sequence[Range],
    holds: bool,
) -> tuple[dict[str, int], tuple[bytes, bytes]]:
    """Reduce random numbers twice: how many elements each model reproduces here, and both results' digests."""
    rank, world_size = reducer.rank, reducer.world_size
    reproduced = dict.fromkeys(models(dtype), 0)
    digests = [hashlib.blake2b(digest_size=16) for _ in range(2)]
    for seed in range(num_replays(count)):
        own = near_contribution(dtype, count, rank, world_size, seed)
        results = [reducer.reduce(collective, ReduceOp.SUM, dtype, own, root=root) for _ in range(2)]
        for digest, result in zip(digests, results, strict=True):
            digest.update(result.tobytes())
        if holds:
            inputs = [near_contribution(dtype, count, other, world_size, seed) for other in range(world_size)]
            held = held_elements(collective, count, rank, world_size, root)
            for model, number in _reproduce(results[0], held, ranges, inputs, dtype).items():
                reproduced[model] += number
    return reproduced, (digests[0].digest(), digests[1].digest())


def num_replays(count: int) -> int:
    """How many random reductions: one, or more where one has too few elements to tell the models apart."""
    return min(-(-_REPLAYED_ELEMS // count), 64)


def _reproduce(
    result: Bytes, held: tuple[int, int], ranges: Sequence[Range], inputs: Sequence[Bytes], dtype: DType
) -> dict[str, int]:
    """For each model, how many of the held elements the trees give bit by bit."""
    reproduced = dict.fromkeys(models(dtype), 0)
    first, last = held
    for found in ranges:
        start, stop = max(found.start, first), min(found.stop, last)
        if found.tree is None or start >= stop:
            continue
        part = slice(start * dtype.itemsize, stop * dtype.itemsize)
        actual = result[(start - first) * dtype.itemsize : (stop - first) * dtype.itemsize]
        for model, accumulate in models(dtype).items():
            expected = evaluate(found.tree, [data[part] for data in inputs], dtype, accumulate)
            reproduced[model] += equal_elements(actual, expected, dtype.itemsize)
    return reproduced


def _promised_classes(promised: Association, probed: Probed, found: Range) -> Iterator[tuple[int, int, int]]:
    """Start, stop and element class of the parts of a range for which one tree is promised."""
    position = found.start
    while position < found.stop:
        if promised.name != "ring":
            stop, element_class = found.stop, 0
        elif probed.collective is Collective.REDUCE_SCATTER:
            shard = probed.count // probed.world_size
            element_class = position // shard
            stop = (element_class + 1) * shard
        else:
            element_class = promised.element_class(position, probed.world_size)
            stop = (position // promised.ring_chunk_elems + 1) * promised.ring_chunk_elems
        yield position, min(stop, found.stop), element_class
        position = stop
