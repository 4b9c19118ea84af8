# SPDX-License-Identifier: Apache-2.0
"""What is promised: the guarantees, and which of them each association gives."""

import enum
from dataclasses import dataclass
from typing import Any

from detcomm.association import Association
from detcomm.collectives import Accumulate, DType
from detcomm.options import Options


class Guarantee(enum.Enum):
    """The bits of an element do not change with ..."""

    RANK = "rank"
    RUN = "run"
    SCHEDULE = "schedule"
    SIZE = "size"
    COMPOSITION = "composition"
    PLACEMENT = "placement"
    DEVICE = "device"
    SPEC = "spec"
    CONTROL = "control"

    @property
    def meaning(self) -> str:
        """What is varied."""
        return _MEANINGS[self]


_MEANINGS = {
    Guarantee.RANK: "the rank that looks at the result",
    Guarantee.RUN: "another run, with other delays between ranks",
    Guarantee.SCHEDULE: "the schedule and its chunk size",
    Guarantee.SIZE: "the size of the message and the position in it",
    Guarantee.COMPOSITION: "all-reduce, or reduce-scatter and all-gather, or reduce and broadcast",
    Guarantee.PLACEMENT: "which process has which rank, and the transport",
    Guarantee.DEVICE: "the device: the portable folds give the same bits",
    Guarantee.SPEC: "the release and the cluster: the golden vectors that ship",
    Guarantee.CONTROL: "not a guarantee: other additions do give other bits of these inputs",
}


@dataclass(frozen=True)
class Contract:
    """One association and precision of detcomm."""

    association: Association
    accumulate: Accumulate

    @property
    def id(self) -> str:
        """``tree/1:float32``."""
        return self.association.numerics_id(self.accumulate)

    @property
    def by_position(self) -> bool:
        """Whether an element's tree depends on its position, so that size and composition hold in part alone."""
        return self.association.name == "ring"

    def options(self, **speed: Any) -> Options:
        """Options of a group with this contract."""
        return Options(
            association=self.association.name,
            ring_chunk_elems=self.association.ring_chunk_elems,
            accumulate=self.accumulate,
            **speed,
        )

    def differs_from_float32(self, dtype: DType) -> bool:
        """Whether this precision is another one than ``float32`` for this type."""
        return self.accumulate == "float32" or dtype in (DType.BFLOAT16, DType.FLOAT16)
