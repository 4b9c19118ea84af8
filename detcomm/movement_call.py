# SPDX-License-Identifier: Apache-2.0
"""A movement of data without arithmetic as a value: everything about it that all ranks must agree on.

As ``call`` is for what detcomm plans. Sends and receives are no such value, since two ranks alone take part; nor are
the sizes of an all-to-all, which differ between the pairs of ranks (``splits``).
"""

from dataclasses import dataclass

BROADCAST = "broadcast"
GATHER = "gather"
SCATTER = "scatter"
ALL_TO_ALL = "all_to_all"
BARRIER = "barrier"
ROOTED = (BROADCAST, GATHER, SCATTER)
MOVEMENTS = (*ROOTED, ALL_TO_ALL, BARRIER)


@dataclass(frozen=True, slots=True)
class MovementCall:
    """What is moved, in elements.

    Args:
        name: one of ``MOVEMENTS``; ``all_to_all`` for both of torch's forms.
        dtype: torch's name of the element type; empty for a barrier.
        count: elements of the tensor that each rank gives or receives; 0 where they differ between the ranks.
        root: the group rank that gives or receives all of them; 0 where there is none.
    """

    name: str
    dtype: str = ""
    count: int = 0
    root: int = 0

    def text(self) -> str:
        """``broadcast(float32[6], root 0)``, as error messages print it."""
        if self.name in ROOTED:
            return f"{self.name}({self.dtype}[{self.count}], root {self.root})"
        return f"{self.name}({self.dtype})"
