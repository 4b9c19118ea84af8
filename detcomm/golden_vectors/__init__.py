# SPDX-License-Identifier: Apache-2.0
"""Golden vectors: for each numerics id small inputs and the bits that their reduction must have, in files that ship.

One file holds the inputs, one more each numerics id; numbers are in hexadecimal, as they lie in memory on a
little-endian machine. The bits were made by an implementation of the specification that shares no code with this
package, and they never change under their id. Types whose bits do not depend on the accumulation mode stand in the
``float32`` file alone.

Knows nothing of how a reduction is done; ``detcomm.testing.check_golden`` does the checking.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detcomm.association import Association
from detcomm.collectives import Accumulate, DType, ReduceOp

INPUTS_FILE = "inputs.json"


@dataclass(frozen=True, eq=False)
class GoldenCase:
    """One all-reduce whose bits are known.

    Attributes:
        inputs: each rank's contribution, as bytes.
        factors: each rank's factor of a PREMUL_SUM; ``None`` for other operations.
        expected: the bytes of the result.
    """

    numerics_id: str
    association: Association
    accumulate: Accumulate
    dtype: DType
    op: ReduceOp
    world_size: int
    inputs: tuple[NDArray[np.uint8], ...]
    factors: tuple[float, ...] | None
    expected: NDArray[np.uint8]

    def __str__(self) -> str:
        return f"{self.numerics_id} {self.op.value} {self.dtype.value} of {self.world_size} ranks"


def numerics_ids() -> tuple[str, ...]:
    """The ids that golden vectors ship for."""
    return tuple(_files())


def cases(numerics_id: str | None = None) -> Iterator[GoldenCase]:
    """All cases of one id, or of all ids; by world size first.

    Raises:
        KeyError: no vectors ship for this id.
    """
    for name in numerics_ids() if numerics_id is None else (numerics_id,):
        yield from _cases(name)


def _cases(numerics_id: str) -> Iterator[GoldenCase]:
    shared, content = _load(INPUTS_FILE), _load(_files()[numerics_id])
    results: dict[str, dict[str, dict[str, str]]] = dict(content["results"])
    if "otherwise" in content:
        results = _load(_files()[content["otherwise"]])["results"] | results
    association = Association(content["association"], content["ring_chunk_elems"])
    for world_size in shared["world_sizes"]:
        for dtype, by_op in results.items():
            inputs = tuple(_bytes(text) for text in shared["inputs"][dtype][str(world_size)])
            for op, by_world in by_op.items():
                factors = tuple(float.fromhex(text) for text in shared["factors"][:world_size])
                yield GoldenCase(
                    numerics_id=numerics_id,
                    association=association,
                    accumulate=content["accumulate"],
                    dtype=DType(dtype),
                    op=ReduceOp(op),
                    world_size=world_size,
                    inputs=inputs,
                    factors=factors if op == "premul_sum" else None,
                    expected=_bytes(by_world[str(world_size)]),
                )


@cache
def _files() -> dict[str, str]:
    """The file of each id."""
    names = sorted(entry.name for entry in resources.files(__name__).iterdir() if entry.name.endswith(".json"))
    return {_load(name)["numerics_id"]: name for name in names if name != INPUTS_FILE}


@cache
def _load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(resources.files(__name__).joinpath(name).read_text("utf-8"))
    return content


def _bytes(text: str) -> NDArray[np.uint8]:
    data = np.frombuffer(bytes.fromhex(text), np.uint8)
    data.flags.writeable = False
    return data
