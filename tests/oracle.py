# SPDX-License-Identifier: Apache-2.0
"""What the bits of a reduction must be: ``docs/numerics.md`` written down a second time, in NumPy.

Shares no code with detcomm, on purpose: a mistake in the folds, the planner or the transports cannot be here too.
It is itself checked against exact rational arithmetic (``exact_oracle.py``). Knows nothing of messages or steps.

Types are named as torch names them. bfloat16 arrays hold their bits in ``uint16``; every other type is NumPy's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Tree = int | tuple["Tree", "Tree"]
Combine = Callable[[Array, Array], Array]

CANONICAL_NAN = {"float32": 0x7FC00000, "float64": 0x7FF8000000000000, "bfloat16": 0x7FC0, "float16": 0x7E00}
INFINITY = {"float32": 0x7F800000, "float64": 0x7FF0000000000000, "bfloat16": 0x7F80, "float16": 0x7C00}
BITS = {"float32": np.uint32, "float64": np.uint64, "bfloat16": np.uint16, "float16": np.uint16}
REAL_PART = {"complex64": "float32", "complex128": "float64"}


def storage(dtype: str) -> np.dtype[Any]:
    """The NumPy type that holds one element."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def reduce(
    inputs: Sequence[Array],
    dtype: str,
    op: str,
    *,
    association: str = "tree",
    ring_chunk_elems: int = 65536,
    accumulate: str = "float32",
    factors: Sequence[float] | None = None,
    shard_owner: int | None = None,
) -> Array:
    """The result of one reduction, for every element.

    Args:
        inputs: the contributions, one array per group rank, all of one length.
        dtype: element type.
        op: ``sum``, ``avg``, ``product``, ``min``, ``max``, ``premul_sum``, ``band``, ``bor`` or ``bxor``.
        association: ``tree``, ``linear`` or ``ring``.
        ring_chunk_elems: length of ``ring``'s fixed chunks.
        accumulate: ``float32`` or ``wire``; matters for 16-bit types alone.
        factors: each rank's factor, for ``premul_sum``.
        shard_owner: the receiving rank of all these elements, for ``ring`` in reduce-scatter; otherwise the
            owner follows from the position.

    Returns:
        A new array of the tensor's storage type.
    """
    if dtype in REAL_PART:
        reals = [x.view(REAL_PART[dtype]) for x in inputs]  # pairs; the chunks of ring count reals
        result = reduce(
            reals,
            REAL_PART[dtype],
            op,
            association=association,
            ring_chunk_elems=ring_chunk_elems,
            accumulate=accumulate,
            factors=factors,
            shard_owner=shard_owner,
        )
        return result.view(dtype)
    world_size = len(inputs)
    leaves = list(inputs)
    if op == "premul_sum":
        assert factors is not None
        leaves = [premultiply(x, dtype, factor) for x, factor in zip(leaves, factors, strict=True)]
        op = "sum"
    if world_size == 1:
        return leaves[0].copy()  # no arithmetic: every bit stays
    if association != "ring":
        return _reduce_tree(leaves, dtype, op, accumulate, tree(association, world_size))
    result = np.empty_like(leaves[0])
    owners = np.arange(len(result)) // ring_chunk_elems % world_size
    if shard_owner is not None:
        owners[:] = shard_owner
    for owner in range(world_size):
        mine = owners == owner
        if mine.any():
            part = [x[mine] for x in leaves]
            result[mine] = _reduce_tree(part, dtype, op, accumulate, tree("ring", world_size, owner))
    return result


def tree(association: str, world_size: int, owner: int = 0) -> Tree:
    """The order of additions as nested pairs of ranks, the left operand first."""
    if association == "tree":
        return _rfc6962(list(range(world_size)))
    first = owner + 1 if association == "ring" else 0
    ranks = [(first + i) % world_size for i in range(world_size)]
    chain: Tree = ranks[0]
    for rank in ranks[1:]:
        chain = (chain, rank)
    return chain


def _rfc6962(ranks: list[int]) -> Tree:
    if len(ranks) == 1:
        return ranks[0]
    k = 1
    while 2 * k < len(ranks):
        k *= 2
    return (_rfc6962(ranks[:k]), _rfc6962(ranks[k:]))


def _reduce_tree(leaves: list[Array], dtype: str, op: str, accumulate: str, order: Tree) -> Array:
    world_size = len(leaves)
    if dtype not in BITS:
        return _integer_reduce(leaves, dtype, op, order)
    if op in ("min", "max"):
        return _evaluate(order, leaves, lambda a, b: _extremum(a, b, dtype, op))
    arithmetic = np.multiply if op == "product" else np.add
    wire = accumulate == "wire"

    def combine(a: Array, b: Array) -> Array:
        total: Array = arithmetic(a, b)
        return widen(narrow(total, dtype), dtype) if wire else total

    with np.errstate(all="ignore"):
        total = _evaluate(order, [widen(x, dtype) for x in leaves], combine)
        if op == "avg":
            total = total / total.dtype.type(world_size)
    return narrow(total, dtype)


def _evaluate(order: Tree, leaves: list[Array], combine: Combine) -> Array:
    if isinstance(order, int):
        return leaves[order]
    left, right = order
    return combine(_evaluate(left, leaves, combine), _evaluate(right, leaves, combine))


def premultiply(x: Array, dtype: str, factor: float) -> Array:
    """What the sender of a PREMUL_SUM sends: x·f in the accumulator's precision, rounded to the type."""
    if dtype in REAL_PART:
        return premultiply(x.view(REAL_PART[dtype]), REAL_PART[dtype], factor).view(dtype)
    with np.errstate(all="ignore"):
        wide = widen(x, dtype)
        return narrow(wide * wide.dtype.type(factor), dtype)


def widen(x: Array, dtype: str) -> Array:
    """A leaf as a number of the accumulator's type; exact."""
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return x.astype(np.float32) if dtype == "float16" else x


def narrow(x: Array, dtype: str) -> Array:
    """The accumulator rounded to the tensor's type, to nearest even, any NaN the canonical one."""
    nan = np.isnan(x)
    if dtype == "bfloat16":
        word = x.view(np.uint32)
        odd = (word >> np.uint32(16)) & np.uint32(1)
        stored = ((word + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    elif dtype == "float16":
        with np.errstate(all="ignore"):
            stored = x.astype(np.float16)
    else:
        stored = x.copy()
    stored.view(BITS[dtype])[nan] = CANONICAL_NAN[dtype]
    return stored


def _extremum(a: Array, b: Array, dtype: str, op: str) -> Array:
    """IEEE 754-2019 minimum or maximum, by the order of the bits as sign and magnitude: -0 lies below +0."""
    bits = BITS[dtype]
    word_a, word_b = a.view(bits), b.view(bits)
    rank_a, rank_b = _position(word_a), _position(word_b)
    take_a = rank_a <= rank_b if op == "min" else rank_a >= rank_b
    word = np.where(take_a, word_a, word_b)
    word[_is_nan(word_a, dtype) | _is_nan(word_b, dtype)] = CANONICAL_NAN[dtype]
    return np.asarray(word.view(storage(dtype)))


def _position(word: Array) -> Array:
    """Where a float stands on the number line, as a signed integer."""
    signed = np.dtype(f"int{8 * word.itemsize}").type
    number = word.view(signed)
    return np.asarray(np.where(number < 0, signed(-1) - (number & np.iinfo(signed).max), number))


def _is_nan(word: Array, dtype: str) -> Array:
    magnitude = word & word.dtype.type((1 << (8 * word.itemsize - 1)) - 1)
    return np.asarray(magnitude > word.dtype.type(INFINITY[dtype]))


def _integer_reduce(leaves: list[Array], dtype: str, op: str, order: Tree) -> Array:
    combine: Combine = {
        "sum": np.add,  # on NumPy's bool, addition is logical or and multiplication logical and
        "avg": np.add,
        "product": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }[op]
    with np.errstate(all="ignore"):  # wraps modulo 2^w
        total = _evaluate(order, leaves, combine)
    if op != "avg":
        return total
    wide = total.astype(np.uint64 if dtype.startswith("uint") else np.int64)
    world_size = wide.dtype.type(len(leaves))
    quotient, remainder = np.divmod(wide, world_size)  # rounds down
    toward_zero = quotient + ((wide < 0) & (remainder != 0)).astype(wide.dtype)
    return np.asarray(toward_zero.astype(total.dtype))
