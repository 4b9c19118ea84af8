# SPDX-License-Identifier: Apache-2.0
"""What became of every group: description, ranks, backend, numerics, calls so far, and what goes through it."""

from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import torch.distributed as dist
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table

from detcomm.header import ranks_text
from detcomm.megatron.inventory import traffic_of
from detcomm.megatron.job import Job, current
from detcomm.megatron.routing import RoutedGroup
from detcomm.megatron.step_switch import steps_text
from detcomm.options import Options
from detcomm.process_group import BACKEND_NAME

ELSEWHERE = "elsewhere"
"""Who chose the backend of a group that was made neither by Megatron's ``create_group`` nor by ``initialize``."""


_MOST_GROUPS_A_LINE = 4


@attrs.frozen
class ReportedGroup:
    """One group, as plain values.

    Args:
        numerics_id: ``None`` for a group of another backend: no order of its sums is specified.
        num_calls: reductions and all-gathers on this group so far, where it counts them; a group of one rank does not.
        chosen_by: ``policy``, ``Megatron`` or ``elsewhere``.
        ignored: settings for NCCL that Megatron asked for and a fixed-order group does not have.
        known: whether a known release of Megatron makes such groups.
    """

    description: str
    ranks: tuple[int, ...]
    backend: str
    numerics_id: str | None
    num_calls: int | None
    reduces: str
    moves: str
    chosen_by: str
    ignored: tuple[str, ...]
    known: bool


@attrs.frozen
class Report:
    """The groups of one rank, or of all; ``rich`` prints it as a table, groups of one description on a line.

    Args:
        unused_rules: rules of the policy that fit no group so far.
        switched: for a job that is in fixed order for some steps alone: which, and what holds now.
    """

    groups: tuple[ReportedGroup, ...]
    policy: str
    unused_rules: tuple[str, ...]
    environment_set: tuple[str, ...]
    switched: str | None

    @property
    def notes(self) -> list[str]:
        """What a reader should know beside the table."""
        notes = [f"policy: {self.policy}", *([self.switched] if self.switched else [])]
        notes += [f"no group fits the rule {rule}" for rule in self.unused_rules]
        notes += [
            f"{group.description}: Megatron's {', '.join(group.ignored)} ignored"
            for group in self.groups
            if group.ignored
        ]
        unknown = dict.fromkeys(group.description for group in self.groups if not group.known)
        notes += [f"{description}: no known release of Megatron makes it" for description in unknown]
        notes += [f"set: {variable}" for variable in self.environment_set]
        return notes

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # On a narrow console, and in a log file, names go on in the next line: what is cut off cannot be looked up.
        whole = [Column(name, overflow="fold") for name in ("group", "ranks", "backend", "numerics")]
        table = Table(*whole, "calls", "sums", "also")
        for alike in _alike(self.groups):
            first = alike[0]
            shown = [ranks_text(group.ranks).partition(" ")[2] for group in alike[:_MOST_GROUPS_A_LINE]]
            more = [f"… {len(alike) - len(shown)} more"] if len(alike) > len(shown) else []
            calls = "" if first.num_calls is None else f"{first.num_calls:,}"
            numerics = first.numerics_id or "unspecified"
            table.add_row(
                first.description,
                " | ".join([*shown, *more]),
                first.backend,
                numerics,
                calls,
                first.reduces,
                first.moves,
            )
        yield table
        yield from self.notes


def report(*, all_ranks: bool = False) -> Report:
    """The groups of this rank; with ``all_ranks`` those of every rank, and then all ranks must call this.

    Raises:
        UsageError: ``initialize`` has not been called.
    """
    job = current()
    groups = list(_groups_here(job))
    if all_ranks:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, groups)
        # A group is known by what it is for and who is in it; its first member tells of it.
        merged = {(group.description, group.ranks): group for part in reversed(gathered) for group in part}
        groups = list(dict(sorted(merged.items(), key=lambda item: (item[0][1], item[0][0]))).values())
    policy = job.policy
    unused = policy.unused([*job.router.made, *(group.description for group in groups)])
    return Report(tuple(groups), str(policy), tuple(map(str, unused)), job.environment_set, _switched(job))


def _switched(job: Job) -> str | None:
    if job.switch is None:
        return None
    now = "fixed" if job.switch.fixed_order else "stock"
    return f"fixed order in steps {steps_text(job.switch.steps)} alone; now {now}"


def _alike(groups: Iterable[ReportedGroup]) -> list[list[ReportedGroup]]:
    """Groups that differ in nothing but their ranks and the details of their use, for one line of the table."""
    lines: dict[tuple[str, str, str | None], list[ReportedGroup]] = {}
    for group in groups:
        lines.setdefault((group.description, group.backend, group.numerics_id), []).append(group)
    return list(lines.values())


def _groups_here(job: Job) -> Iterator[ReportedGroup]:
    seen = set()
    for routed in job.router.groups:
        seen.add(routed.group)
        yield _reported(routed)
    world = dist.distributed_c10d._world
    for group in world.pg_map:
        if group not in seen:
            ranks = tuple(dist.get_process_group_ranks(group))
            backend = world.pg_backend_config.get(group, dist.get_backend(group))
            yield _reported(RoutedGroup(group.group_desc, ranks, str(backend), None, group, ELSEWHERE))


def _reported(routed: RoutedGroup) -> ReportedGroup:
    traffic = traffic_of(routed.description)
    fixed = BACKEND_NAME in routed.backend
    options = routed.options or getattr(routed.group, "options", None)
    return ReportedGroup(
        routed.description,
        routed.ranks,
        routed.backend,
        options.numerics_id if isinstance(options, Options) else None,
        routed.group._get_sequence_number_for_group() if fixed and len(routed.ranks) > 1 else None,
        traffic.reduces if traffic else "",
        traffic.moves if traffic else "",
        routed.chosen_by,
        routed.ignored,
        routed.known,
    )
