# SPDX-License-Identifier: Apache-2.0
"""At the creation of a group every rank introduces itself through the store and reads what all others are.

All ranks see the same introductions, so all come to the same verdict: the group, or one error that names the option
and the ranks. A rank that cannot take part says so here, before the others wait for it. Knows nothing of transports.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import attrs
from torch.distributed import Store

from detcomm import store_access
from detcomm.errors import MismatchError, PeerTimeoutError, UsageError
from detcomm.header import ranks_text
from detcomm.hosts import host_identity
from detcomm.options import Options
from detcomm.version import __version__

_PREFIX = "detcomm/introduction/"
_REFUSED = "detcomm/refused"


@dataclass(frozen=True)
class Introduction:
    """What one rank tells the others at the creation of a group.

    Args:
        host: see ``hosts.host_identity``.
        options: the options as texts, by name; equal on all ranks.
        numerics_id: the name of the bits; equal on all ranks.
        version: detcomm's; equal on all ranks, since schedules may differ between releases.
        byte_order: equal on all ranks, since messages are memory as it is.
        extra: further facts that must be equal, by name.
        member: this rank's process, as the watch wants it told; see ``watched_group.Member``.
    """

    rank: int
    host: str
    options: dict[str, str]
    numerics_id: str
    version: str
    byte_order: str
    extra: dict[str, str]
    member: str

    def facts(self) -> dict[str, str]:
        """Everything that must be equal on all ranks, under the names that messages use."""
        options = {f"option {name}": text for name, text in self.options.items()}
        own = {"numerics id": self.numerics_id, "detcomm version": self.version, "byte order": self.byte_order}
        return options | own | self.extra


def introduce(
    store: Store,
    rank: int,
    world_size: int,
    make_options: Callable[[], Options],
    timeout_s: float,
    extra: dict[str, str] | None = None,
    group: str = "",
    member: str = "",
) -> tuple[Options, tuple[Introduction, ...]]:
    """Publish this rank's introduction, read all others', and agree on the options or raise on every rank.

    Args:
        store: the group's own key space.
        make_options: gives the options or raises ``UsageError``: a refusal, which the other ranks are told.
        timeout_s: how long to wait for ranks that have not come.
        extra: further facts that must be equal on all ranks, by name.
        group: the group's name, for messages.
        member: told to the others.

    Returns:
        The options, and each rank's introduction by rank.

    Raises:
        UsageError: this rank's own refusal.
        MismatchError: the ranks differ, naming the option and which ranks have which value; or another rank refused.
        PeerTimeoutError: ranks did not come; names them.
    """
    where = f"group {group!r}" if group else "group"
    try:
        options = make_options()
        own = _introduction(rank, options, extra or {}, member)
    except UsageError as error:
        refuse(store, rank, str(error))
        raise
    store.set(f"{_PREFIX}{rank}", json.dumps(asdict(own)))
    started = time.monotonic()
    keys = [f"{_PREFIX}{peer}" for peer in range(world_size)]
    texts = store_access.read_all(store, keys, timeout_s, stop=lambda: store.check([_REFUSED]))
    check_refusals(store, rank, where)
    absent = [peer for peer, text in enumerate(texts) if text is None]
    if absent:
        waited_s = time.monotonic() - started
        message = f"{where}: {ranks_text(absent)} of {world_size} did not come within {waited_s:.1f} s"
        refuse(store, rank, message)  # so that a late rank does not wait for us in turn
        raise PeerTimeoutError(message)
    introductions = tuple(Introduction(**json.loads(text)) for text in texts if text is not None)
    check_equal(introductions, where)
    return options, introductions


def refuse(store: Store, rank: int, reason: str) -> None:
    """Tell the other ranks that this one does not take part; the first refusal of a group counts."""
    store.compare_set(_REFUSED, "", json.dumps({"rank": rank, "reason": reason}))


def check_refusals(store: Store, rank: int, where: str) -> None:
    """Raise if a rank has refused to take part.

    Raises:
        MismatchError: naming the rank and its reason.
    """
    text = store_access.read(store, _REFUSED)
    if text is not None:
        refusal = json.loads(text)
        if refusal["rank"] != rank:
            raise MismatchError(f"{where}: not created, since rank {refusal['rank']} refused: {refusal['reason']}")


def check_equal(introductions: Sequence[Introduction], where: str) -> None:
    """Compare what must be equal.

    Raises:
        MismatchError: naming every fact that differs, with the ranks that have each value.
    """
    facts = {introduction.rank: introduction.facts() for introduction in introductions}
    differences = []
    for name in dict.fromkeys(name for own in facts.values() for name in own):
        ranks_of: dict[str, list[int]] = {}
        for rank, own in facts.items():
            ranks_of.setdefault(own.get(name, "(absent)"), []).append(rank)
        if len(ranks_of) > 1:
            values = "; ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in ranks_of.items())
            differences.append(f"{name}: {values}")
    if differences:
        raise MismatchError(f"{where}: not created, since its ranks differ: {'. '.join(differences)}")


def _introduction(rank: int, options: Options, extra: dict[str, str], member: str) -> Introduction:
    return Introduction(
        rank=rank,
        host=host_identity(),
        options={field.name: _option_text(getattr(options, field.name)) for field in attrs.fields(Options)},
        numerics_id=options.numerics_id,
        version=__version__,
        byte_order=sys.byteorder,
        extra=extra,
        member=member,
    )


def _option_text(value: Any) -> str:
    return f"{value.total_seconds():g} s" if isinstance(value, timedelta) else str(value)
