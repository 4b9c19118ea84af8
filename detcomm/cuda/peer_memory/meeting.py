# SPDX-License-Identifier: Apache-2.0
"""Rounds in which the ranks of a block tell each other a text, and verdicts to which all blocks of a group agree.

Through the group's store, a key for each rank and round. All ranks of a block make the same rounds in the same order.
Every wait ends: with the answers, at a deadline that names who did not come, or as soon as the group has failed.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from detcomm import store_access
from detcomm.errors import PeerTimeoutError, TransportError
from detcomm.header import ranks_text


class Meeting:
    """One rank's view.

    Attributes:
        ranks: the group ranks of this rank's block.
        index: of this rank in it.
        number: of the block.
        num_rounds: so far, the same on all ranks of the block.
        num_retired: pieces of memory given up so far, likewise.

    Args:
        store: a key space of these rounds alone.
        name: of the group, for messages.
        blocks: the group ranks of each block, ascending.
        rank: this rank in the group.
        failure: the group's first error, once there is one.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        blocks: Sequence[Sequence[int]],
        rank: int,
        failure: Callable[[], BaseException | None],
    ) -> None:
        self.store = store
        self.name = name
        self.rank = rank
        self.number = next(number for number, block in enumerate(blocks) if rank in block)
        self.ranks = tuple(blocks[self.number])
        self.index = self.ranks.index(rank)
        self._num_blocks = len(blocks)
        self._leaders = [block[0] for block in blocks]
        self._failure = failure
        self.num_rounds = 0
        self.num_retired = 0
        self._num_verdicts = 0

    def exchange(self, what: str, text: str, deadline: float) -> list[str]:
        """Everybody's text, by index in the block.

        Raises:
            PeerTimeoutError: ranks did not come by ``deadline``; names them.
            TransportError: the group has failed.
        """
        self.num_rounds += 1
        space = f"{self.num_rounds}/{what}/{self.number}"
        self._tell(what, f"{space}/{self.rank}", text)
        return self._read(what, [f"{space}/{rank}" for rank in self.ranks], self.ranks, deadline)

    def verdict(self, what: str, reason: str, deadline: float) -> str:
        """The first nonempty reason of all blocks, the same on all ranks of the group; empty if there is none.

        Args:
            reason: this block's, equal on its ranks.
        """
        self._num_verdicts += 1  # of their own: a block that fails early makes fewer rounds than others
        if self._num_blocks == 1:
            return reason
        space = f"verdict {self._num_verdicts}/{what}"
        if self.index == 0:
            self._tell(what, f"{space}/{self.number}", reason)
        keys = [f"{space}/{number}" for number in range(self._num_blocks)]
        return next((text for text in self._read(what, keys, self._leaders, deadline) if text), "")

    def has_failed(self) -> bool:
        """Whether the group has an error."""
        return self._failure() is not None

    def agree(self, what: str, error: str, deadline: float) -> str:
        """The errors of all ranks of the block in one text; empty if nobody has one."""
        return errors_text(self.ranks, self.exchange(what, error, deadline))

    def _tell(self, what: str, key: str, text: str) -> None:
        try:
            self.store.set(key, text)
        except RuntimeError as error:  # what every error of torch's stores is
            raise self._lost(what, str(error).partition("\n")[0]) from error

    def _read(self, what: str, keys: list[str], ranks: Sequence[int], deadline: float) -> list[str]:
        left_s = max(deadline - time.monotonic(), 0.0)
        try:
            texts = store_access.read_all(self.store, keys, left_s, self.has_failed)
        except RuntimeError as error:
            raise self._lost(what, str(error).partition("\n")[0]) from error
        cause = self._failure()
        if cause is not None:
            raise self._lost(what, str(cause))
        absent = [rank for rank, text in zip(ranks, texts, strict=True) if text is None]
        if absent:
            raise PeerTimeoutError(
                f"group {self.name}: {ranks_text(absent)} did not come to connect peer memory ({what}) within the "
                "group's timeout: has it called the same collective?"
            )
        return [text for text in texts if text is not None]

    def _lost(self, what: str, cause: str) -> TransportError:
        return TransportError(f"group {self.name}: peer memory was not connected ({what}): {cause}")


def errors_text(ranks: Sequence[int], errors: Sequence[str]) -> str:
    """Errors by rank in one text, equal ones once; empty if all are."""
    ranks_of: dict[str, list[int]] = {}
    for rank, error in zip(ranks, errors, strict=True):
        if error:
            ranks_of.setdefault(error, []).append(rank)
    return "; ".join(f"{ranks_text(who)}: {error}" for error, who in ranks_of.items())


def encode(**fields: Any) -> str:
    """A round's text of several fields."""
    return json.dumps(fields)


def decode(text: str) -> dict[str, Any]:
    """The fields of a round's text."""
    fields: dict[str, Any] = json.loads(text)
    return fields
