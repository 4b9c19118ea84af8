# SPDX-License-Identifier: Apache-2.0
"""The closed sets that everything else speaks of: collectives, operations, element types.

Knows neither torch nor NumPy: a planner run needs no numerical library.
"""

import enum
from dataclasses import dataclass
from typing import Literal

from detcomm.errors import UnsupportedError

Accumulate = Literal["float32", "wire"]


class Collective(enum.Enum):
    """The collectives whose schedules detcomm plans."""

    __hash__ = object.__hash__  # members are unique; Enum's own is Python, and every cached plan is found by it

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    REDUCE = "reduce"

    @property
    def reduces(self) -> bool:
        """Whether the collective does arithmetic."""
        return self is not Collective.ALL_GATHER


class ReduceOp(enum.Enum):
    """Reduction operations, named as torch names them."""

    __hash__ = object.__hash__  # members are unique; Enum's own is Python, and every cached plan is found by it

    SUM = "sum"
    AVG = "avg"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    PREMUL_SUM = "premul_sum"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


Kind = Literal["float", "int", "uint", "bool", "complex"]


@dataclass(frozen=True)
class _Layout:
    kind: Kind
    itemsize: int


class DType(enum.Enum):
    """Element types on which arithmetic is specified. The value is torch's name of the type."""

    __hash__ = object.__hash__  # members are unique; Enum's own is Python, and every cached plan is found by it

    FLOAT32 = "float32"
    FLOAT64 = "float64"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    BOOL = "bool"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _LAYOUTS[self].itemsize

    @property
    def kind(self) -> Kind:
        return _LAYOUTS[self].kind

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def real(self) -> "DType":
        """The type of the parts: complex numbers are reduced as pairs of reals."""
        return {DType.COMPLEX64: DType.FLOAT32, DType.COMPLEX128: DType.FLOAT64}.get(self, self)


_LAYOUTS = {
    DType.FLOAT32: _Layout("float", 4),
    DType.FLOAT64: _Layout("float", 8),
    DType.BFLOAT16: _Layout("float", 2),
    DType.FLOAT16: _Layout("float", 2),
    DType.INT8: _Layout("int", 1),
    DType.INT16: _Layout("int", 2),
    DType.INT32: _Layout("int", 4),
    DType.INT64: _Layout("int", 8),
    DType.UINT8: _Layout("uint", 1),
    DType.UINT16: _Layout("uint", 2),
    DType.UINT32: _Layout("uint", 4),
    DType.UINT64: _Layout("uint", 8),
    DType.BOOL: _Layout("bool", 1),
    DType.COMPLEX64: _Layout("complex", 8),
    DType.COMPLEX128: _Layout("complex", 16),
}

_FLOAT_OPS = {
    ReduceOp.SUM,
    ReduceOp.AVG,
    ReduceOp.PRODUCT,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.PREMUL_SUM,
}
_BITWISE = {ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR}
_LEGAL: dict[Kind, set[ReduceOp]] = {
    "float": _FLOAT_OPS,
    "int": (_FLOAT_OPS - {ReduceOp.PREMUL_SUM}) | _BITWISE,
    "uint": (_FLOAT_OPS - {ReduceOp.PREMUL_SUM}) | _BITWISE,
    "bool": {ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX} | _BITWISE,
    "complex": {ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM},
}


def is_legal(op: ReduceOp, dtype: DType) -> bool:
    """Whether ``docs/numerics.md`` specifies ``op`` on ``dtype``."""
    return op in _LEGAL[dtype.kind]


def check_legal(op: ReduceOp, dtype: DType) -> None:
    """Refuse an operation that has no specified bits on this type.

    Raises:
        UnsupportedError: naming the operation, the type and what is allowed.
    """
    if not is_legal(op, dtype):
        allowed = ", ".join(sorted(legal.value for legal in _LEGAL[dtype.kind]))
        raise UnsupportedError(f"{op.value} is not defined on {dtype.value}; {dtype.value} takes {allowed}")


def partial_dtype(op: ReduceOp, dtype: DType, accumulate: Accumulate) -> DType:
    """The type in which a partial sum travels between ranks and is stored between folds.

    A 16-bit sum is wider than its leaves under ``float32``; a minimum is always one of its leaves, and under ``wire``
    each partial is rounded to the leaf's type already.
    """
    narrow = dtype in (DType.BFLOAT16, DType.FLOAT16)
    if narrow and accumulate == "float32" and op not in (ReduceOp.MIN, ReduceOp.MAX):
        return DType.FLOAT32  # bits: one rounding, at the root
    return dtype.real
