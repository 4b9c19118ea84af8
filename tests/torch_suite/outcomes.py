# SPDX-License-Identifier: Apache-2.0
"""What a test came to, and files of it: a line of JSON as each test ends, so that a crash loses nothing."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["passed", "skipped", "failed", "error"]
KINDS: tuple[Kind, ...] = ("passed", "skipped", "failed", "error")


@dataclass(frozen=True)
class Outcome:
    """One test of one run. ``reason``: why it was skipped, or the traceback."""

    test: str
    kind: Kind
    reason: str
    seconds: float

    @property
    def is_bad(self) -> bool:
        return self.kind in ("failed", "error")


def append(path: Path, outcome: Outcome) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def read(path: Path) -> dict[str, Outcome]:
    """By test; none if there is no such file."""
    if not path.exists():
        return {}
    outcomes = [Outcome(**json.loads(line)) for line in path.read_text().splitlines()]
    return {outcome.test: outcome for outcome in outcomes}
