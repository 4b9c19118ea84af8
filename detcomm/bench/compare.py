# SPDX-License-Identifier: Apache-2.0
"""Two reports of the same benchmark, before and after a change: what became slower, and what changed its bits."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detcomm.bench.cases import Place
from detcomm.errors import UsageError

Key = tuple[Any, ...]

KINDS = ("collectives", "training")


@dataclass(frozen=True)
class Change:
    """One row and place that both reports have.

    Attributes:
        what: the row in words.
        ratio: new time over old time.
        other_bits: whether the digests of the results differ, which nothing but the order of additions explains.
    """

    what: str
    contender: str
    old_us: float
    new_us: float
    other_bits: bool

    @property
    def ratio(self) -> float:
        return self.new_us / self.old_us


def read(path: Path) -> dict[str, Any]:
    """A report that ``detcomm bench --json`` wrote.

    Raises:
        UsageError: it cannot be read, or is none.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"--compare {path}: {error.strerror}") from error
    except ValueError as error:  # no UTF-8, no JSON
        raise UsageError(f"--compare {path}: expected a report of detcomm bench --json: {error}") from error
    if not isinstance(content, dict) or content.get("kind") not in KINDS or "rows" not in content:
        raise UsageError(f"--compare {path}: expected a report of detcomm bench --json")
    return content


def changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[Change]:
    """The rows of both, in the order of the newer one.

    Raises:
        UsageError: the reports are of different kinds, or of other numbers of ranks.
    """
    for name in ("kind", "world_size", "device"):
        if old[name] != new[name]:
            raise UsageError(f"--compare: {name} is {old[name]!r} in the first report and {new[name]!r} in the second")
    if old["kind"] == "training":
        before = {row["contender"]: row for row in old["rows"]}
        for row in new["rows"]:
            if (was := before.get(row["contender"])) is not None:
                yield _change("training step", row["contender"], was, row, "step_us")
        return
    before_places = {_key(row, place): row[place.value] for row in old["rows"] for place in Place if row[place.value]}
    for row in new["rows"]:
        for place in Place:
            was, now = before_places.get(_key(row, place)), row[place.value]
            if was and now and "median_us" in was and "median_us" in now:
                what = (
                    f"{row['collective']} {row['dtype']} {row['op']} {row['bytes']} B {place.value.replace('_', ' ')}"
                )
                yield _change(what, row["contender"], was, now, "median_us")


def unmatched(old: dict[str, Any], new: dict[str, Any]) -> int:
    """Rows that only one of the reports has."""
    keys = [{_key(row, None) for row in report["rows"]} for report in (old, new)]
    return len(keys[0] ^ keys[1])


def _change(what: str, contender: str, was: dict[str, Any], now: dict[str, Any], time: str) -> Change:
    digests = was.get("digest"), now.get("digest")
    return Change(what, contender, was[time], now[time], None not in digests and digests[0] != digests[1])


def _key(row: dict[str, Any], place: Place | None) -> Key:
    names = ("collective", "dtype", "op", "root", "bytes", "contender")
    return (*(row.get(name) for name in names), place)
