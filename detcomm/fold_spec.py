# SPDX-License-Identifier: Apache-2.0
"""What one fold does, as a value: operation, types, order, and which operands are leaves.

Shared by the native folds, the portable ones and their caller. Knows neither ranks nor plans nor memory.
"""

from dataclasses import dataclass
from typing import get_args

from detcomm.association import Shape
from detcomm.collectives import Accumulate, DType, ReduceOp, check_legal, partial_dtype
from detcomm.errors import UsageError


@dataclass(frozen=True, slots=True)
class FoldSpec:
    """One n-ary reduction: operands in leaf order, combined by ``shape``, stored once.

    Args:
        op: the operation; ``PREMUL_SUM`` adds, since the sender has multiplied already.
        dtype: the tensor's type. Complex tensors are reduced as pairs of reals and never get here.
        accumulate: ``float32``, or ``wire``: round to ``dtype`` after each addition.
        shape: the order of the operations, see ``association.combine``.
        leaves: for each operand, whether it has the tensor's type; otherwise it has ``partial_dtype``.
        final: whether the output is the result, in the tensor's type, or a partial, in ``partial_dtype``.
        divisor: what a final AVG divides by: the world size. Ignored otherwise.

    Raises:
        UnsupportedError: the operation is not defined on the type.
        UsageError: fewer than two operands, an unknown shape or precision, or a divisor below one.
    """

    op: ReduceOp
    dtype: DType
    accumulate: Accumulate
    shape: Shape
    leaves: tuple[bool, ...]
    final: bool
    divisor: int = 1

    def __post_init__(self) -> None:
        check_legal(self.op, self.dtype)
        if self.dtype.kind == "complex":
            raise UsageError(f"fold: describe complex operands by their reals, got {self.dtype.value}")
        if len(self.leaves) < 2:
            raise UsageError(f"fold: expected at least 2 operands, got {len(self.leaves)}")
        if self.shape not in get_args(Shape):
            raise UsageError(f"fold: expected the shape tree or linear, got {self.shape!r}")
        if self.accumulate not in get_args(Accumulate):
            raise UsageError(f"fold: expected the accumulation float32 or wire, got {self.accumulate!r}")
        if self.divisor < 1:
            raise UsageError(f"fold: expected a divisor of at least 1, got {self.divisor}")

    @property
    def partial(self) -> DType:
        """The type of the operands that are no leaves, and of an output that is not final."""
        return partial_dtype(self.op, self.dtype, self.accumulate)

    @property
    def output_dtype(self) -> DType:
        """The type of the output."""
        return self.dtype if self.final else self.partial

    @property
    def input_dtypes(self) -> tuple[DType, ...]:
        """The type of each operand."""
        partial = self.partial
        return tuple(self.dtype if leaf else partial for leaf in self.leaves)

    @property
    def divides(self) -> bool:
        """Whether the combined value is divided before it is stored."""
        return self.op is ReduceOp.AVG and self.final
