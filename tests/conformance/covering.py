# SPDX-License-Identifier: Apache-2.0
"""Pairwise covering: few rows in which any two values of two factors meet, for cases too dear for a full product.

Knows nothing of what the factors mean.
"""

import itertools
from collections.abc import Callable, Sequence

Legal = Callable[[int, int, int, int], bool]
"""``legal(factor, value, other_factor, other_value)``, factors in ascending order: whether the two may meet."""


def _everything(factor: int, value: int, other: int, other_value: int) -> bool:
    return True


def covering(sizes: Sequence[int], legal: Legal = _everything) -> list[tuple[int, ...]]:
    """Rows of values (numbers below each factor's size) in which each legal pair of two factors occurs.

    Greedy, and always the same. Lower values are preferred where there is a choice, so number the cheap ones first.

    Raises:
        ValueError: a row cannot be completed by legal values.
    """
    factors = range(len(sizes))
    missing = {
        (one, i, other, j)
        for one, other in itertools.combinations(factors, 2)
        for i, j in itertools.product(range(sizes[one]), range(sizes[other]))
        if legal(one, i, other, j)
    }
    rows = []
    while missing:
        one, i, other, j = min(missing)
        row = {one: i, other: j}
        for factor in factors:
            if factor not in row:
                row[factor] = _best(factor, sizes[factor], row, missing, legal)
        chosen = tuple(row[factor] for factor in factors)
        missing.difference_update((a, chosen[a], b, chosen[b]) for a, b in itertools.combinations(factors, 2))
        rows.append(chosen)
    return rows


def _best(factor: int, size: int, row: dict[int, int], missing: set[tuple[int, int, int, int]], legal: Legal) -> int:
    """The value that meets most partners for the first time."""
    best, most = -1, -1
    for value in range(size):
        pairs = [
            (other, other_value, factor, value) if other < factor else (factor, value, other, other_value)
            for other, other_value in row.items()
        ]
        if all(legal(*pair) for pair in pairs):
            gain = sum(pair in missing for pair in pairs)
            if gain > most:
                best, most = value, gain
    if best < 0:
        raise ValueError(f"no value of factor {factor} may meet {row}")
    return best
