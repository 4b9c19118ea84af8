# SPDX-License-Identifier: Apache-2.0
"""The exact sum of squares against Python's fractions, over every partition, and in the place of Megatron's norm."""

import math
import struct
from fractions import Fraction

import pytest
import torch

from detcomm.errors import UnsupportedError
from detcomm.megatron import exact_squares, gradient_norm
from detcomm.megatron.exact_squares import NUM_LIMBS, SquareSum

LARGEST = 0x7F7F_FFFF
CPU = torch.device("cpu")


def _from_bits(patterns: torch.Tensor) -> torch.Tensor:
    return patterns.to(torch.int32).view(torch.float32)


def _random(num_elems: int, seed: int) -> torch.Tensor:
    """Finite float32 of every exponent, subnormals and both zeros included."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.randint(0, LARGEST + 1, (num_elems,), generator=generator)
    magnitudes[: num_elems // 8] &= 0x7F_FFFF
    signs = torch.randint(0, 2, (num_elems,), generator=generator) << 31
    return _from_bits((magnitudes | signs).to(torch.int64) - (signs << 1))


def _exact(tensor: torch.Tensor) -> Fraction:
    return sum((Fraction(value) ** 2 for value in tensor.double().flatten().tolist()), Fraction(0))


def _is_nearest_root(root: float, square: Fraction) -> bool:
    """Whether no other float64 is nearer: the square lies between those of the half-way points around the root."""
    below, above = math.nextafter(root, 0), math.nextafter(root, math.inf)
    low, high = (Fraction(root) + Fraction(below)) / 2, (Fraction(root) + Fraction(above)) / 2
    return low**2 <= square <= high**2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_the_sum_is_the_exact_one_and_its_root_is_rounded_once(dtype: torch.dtype, seed: int) -> None:
    values = _random(3000, seed).to(dtype)
    values = values[values.isfinite()]
    total = SquareSum.of([values])
    square = _exact(values)
    assert Fraction(total.units) * Fraction(2) ** -298 == square
    assert _is_nearest_root(total.root(), square)


@pytest.mark.parametrize("pattern", [0, 1, 2, 0x7F_FFFF, 0x80_0000, 0x80_0001, 0x3F80_0001, LARGEST])
def test_the_edges_of_float32(pattern: int) -> None:
    value = struct.unpack("<f", struct.pack("<I", pattern))[0]
    for sign in (1, -1):
        total = SquareSum.of([torch.full((5,), sign * value)])
        assert Fraction(total.units) * Fraction(2) ** -298 == 5 * Fraction(value) ** 2
    assert SquareSum.of([torch.tensor([value])]).root() == value


def test_no_partition_changes_the_sum_and_plain_float32_does(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(4099, generator=torch.Generator().manual_seed(5)) * torch.logspace(-6, 3, 4099)
    monkeypatch.setattr(exact_squares, "_CHUNK_ELEMS", 512)
    whole = SquareSum.of([values])
    partial_float32 = set()
    for num_ranks in (1, 3, 4, 5, 7, 8):
        for shards in (values.tensor_split(num_ranks), values.flip(0).split(-(-4099 // num_ranks))):
            tensors = [SquareSum.of([shard[:100], shard[100:]]).to_tensor(CPU) for shard in shards]
            assert SquareSum.from_tensor(torch.stack(tensors).sum(dim=0)) == whole
            partial_float32.add(float(sum(shard.square().sum() for shard in shards)))
    assert len(partial_float32) > 1, "the inputs cannot fail"


def test_sums_of_more_elements_than_a_chunk() -> None:
    values = torch.full((exact_squares._CHUNK_ELEMS * 2 + 3,), 1 + 2**-23)
    total = SquareSum.of([values, values[:7].reshape(7, 1)])
    assert Fraction(total.units) * Fraction(2) ** -298 == (len(values) + 7) * (1 + Fraction(2) ** -23) ** 2


def test_the_limbs_of_very_many_ranks_carry_over() -> None:
    largest = SquareSum.of([_from_bits(torch.tensor([LARGEST]))])
    num_ranks = 1 << 30
    total = SquareSum.from_tensor(largest.to_tensor(CPU) * num_ranks)
    assert total.units == largest.units * num_ranks
    assert len(largest.to_tensor(CPU)) == NUM_LIMBS + 2


@pytest.mark.parametrize("chunk", [1 << 20, 16])
def test_infinities_and_nans_show_whatever_the_partition(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_squares, "_CHUNK_ELEMS", chunk)
    values = torch.ones(100)
    values[3] = -math.inf
    assert SquareSum.of([values]).root() == math.inf
    values[90] = math.nan
    total = SquareSum.of([values])
    assert math.isnan(total.root())
    assert SquareSum.from_tensor(total.to_tensor(CPU)) == total == SquareSum(0, 1, 1)


def test_a_thread_that_flushes_subnormals_gets_the_same_sum() -> None:
    values = _from_bits(torch.arange(1, 400))
    expected = SquareSum.of([values])
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        assert (values * 1).abs().sum() == 0, "the control: arithmetic of this thread flushes them"
        assert SquareSum.of([values]) == expected
    finally:
        torch.set_flush_denormal(False)


def test_other_types_and_norms_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="float64"):
        SquareSum.of([torch.ones(3, dtype=torch.float64)])
    with pytest.raises(UnsupportedError, match="p=1"):
        gradient_norm.replacing(lambda *_: None)([torch.ones(3)], 1)


def test_the_maximum_stays_megatrons() -> None:
    norm = gradient_norm.replacing(lambda grads, kind, group: ("original", kind, group))
    assert norm([torch.ones(3)], math.inf, "group") == ("original", math.inf, "group")


def test_nothing_has_norm_zero() -> None:
    assert SquareSum.of([]).root() == 0.0
    assert SquareSum.of([torch.empty(0), torch.zeros(3)]) == SquareSum()
