# SPDX-License-Identifier: Apache-2.0
"""The digest of golden runs: against an oracle in plain Python, over types, parts and devices' arithmetic; controls."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from detcomm.errors import UnsupportedError, UsageError
from detcomm.golden import Digest, Grid, digest
from detcomm.golden.positions import Run
from detcomm.golden.tensors import mixed_on_device
from tests.oracle import Array

TWO_64 = 1 << 64


def _splitmix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % TWO_64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % TWO_64
    return z ^ z >> 31


def _murmur(z: int) -> int:
    z = (z ^ z >> 33) * 0xFF51AFD7ED558CCD % TWO_64
    z = (z ^ z >> 33) * 0xC4CEB9FE1A85EC53 % TWO_64
    return z ^ z >> 33


def _oracle(memory: bytes, width: int, indices: list[int] | None = None) -> str:
    """From docs/golden.md, word by word."""
    word, lanes = min(8, width), [0, 0]
    words = [int.from_bytes(memory[at : at + word], "little") for at in range(0, len(memory), word)]
    per_element = width // word
    indices = indices or list(range(len(words) // per_element))
    for number, bits in enumerate(words):
        place = indices[number // per_element] * per_element + number % per_element
        key = (place + width * 0x9E3779B97F4A7C15) % TWO_64
        lanes[0] = (lanes[0] + _splitmix(_splitmix(key) ^ bits)) % TWO_64
        lanes[1] = (lanes[1] + _murmur(_murmur(key) ^ bits)) % TWO_64
    return f"{lanes[0]:016x}{lanes[1]:016x}"


def _random_bytes(count: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
)


def _tensor(name: str, count: int) -> torch.Tensor:
    """Any bits: NaN payloads, signed zeros, subnormals."""
    kind = getattr(torch, name)
    memory = torch.from_numpy(_random_bytes(count * kind.itemsize))
    return memory > 127 if kind is torch.bool else memory.view(kind)


def _on_device(tensor: torch.Tensor, offset: int = 0) -> Digest:
    first, second = mixed_on_device(tensor, Run(offset)).tolist()
    return Digest((first % TWO_64, second % TWO_64))


def test_the_test_vectors_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "golden.md").read_text()
    values = np.array([0.0, -0.0, 1.0, -2.5, np.inf], dtype=np.float32)
    for index, value in enumerate(values):
        alone = digest(values[index : index + 1], offset=index)
        assert f"| {index} | `{value.view(np.uint32):08x}` | `{alone}` |" in page
    for array, says in (
        (values, "| all | | `{}` |"),
        (np.array([1 + 2j], np.complex128), "complex128 `[1+2j]`: `{}`"),
        (np.array([1, 2, 3], np.uint8), "uint8 `[1, 2, 3]`: `{}`"),
    ):
        expected = _oracle(array.tobytes(), array.itemsize)
        assert str(digest(array)) == expected
        assert says.format(expected) in page
    assert str(digest(np.array([], dtype=np.float32))) == "0" * 32


@pytest.mark.parametrize("name", DTYPES)
def test_each_type_gives_the_oracle_s_digest_in_numpy_and_in_torch(name: str) -> None:
    tensor = _tensor(name, 1000)
    memory = tensor.view(torch.uint8).numpy().tobytes()
    expected = _oracle(memory, tensor.element_size())
    assert str(digest(tensor)) == expected
    assert str(_on_device(tensor)) == expected
    if name not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        assert str(digest(tensor.numpy())) == expected
    shifted = _oracle(memory, tensor.element_size(), list(range(7, 1007)))
    assert str(digest(tensor, offset=7)) == str(_on_device(tensor, 7)) == shifted != expected


def test_chunks_do_not_show() -> None:
    values = _random_bytes(300_001)
    tensor = torch.from_numpy(values)
    assert digest(values) == _on_device(tensor) == digest(values[:100_003]) + digest(values[100_003:], 100_003)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.lists(st.integers(0, 400), max_size=6), st.randoms(use_true_random=False))
def test_the_digests_of_parts_add_up_in_any_order(count: int, cuts: list[int], random: object) -> None:
    values = _random_bytes(4 * count, seed=count).view(np.float32)
    bounds = sorted({0, count, *(cut for cut in cuts if cut < count)})
    parts = [digest(values[a:b], offset=a) for a, b in itertools.pairwise(bounds)]
    random.shuffle(parts)  # type: ignore[attr-defined]
    assert sum(parts, Digest()) == digest(values)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.data())
def test_shards_along_any_dimensions_add_up(shape: list[int], data: st.DataObject) -> None:
    values = _random_bytes(2 * int(np.prod(shape)), seed=1).view(np.int16).reshape(shape)
    cuts = [data.draw(st.integers(0, size)) for size in shape]
    total = Digest()
    for corner in np.ndindex(*[2] * len(shape)):
        axes = tuple(
            range(cut, size) if upper else range(cut) for upper, cut, size in zip(corner, cuts, shape, strict=True)
        )
        part = values[tuple(slice(axis.start, axis.stop) for axis in axes)]
        by_grid = digest(part, indices=Grid(axes, tuple(shape)))
        indices = np.arange(values.size).reshape(shape)[tuple(slice(axis.start, axis.stop) for axis in axes)]
        assert by_grid == digest(part, indices=indices) == digest(torch.from_numpy(part.copy()), indices=indices)
        total += by_grid
    assert total == digest(values)


def test_a_strided_shard_is_named_by_arrays_of_indices() -> None:
    values = _random_bytes(4 * 6 * 10).view(np.float32).reshape(6, 10)
    even, odd = (np.arange(first, 10, 2) for first in (0, 1))
    parts = [digest(values[:, axis], indices=Grid((range(6), axis), (6, 10))) for axis in (even, odd)]
    assert sum(parts, Digest()) == digest(values)
    tensor = torch.from_numpy(values)
    grid = Grid((range(6), odd), (6, 10))
    first, second = mixed_on_device(tensor[:, 1::2], grid).tolist()
    assert Digest((first % TWO_64, second % TWO_64)) == parts[1]


def test_elements_count_in_row_major_order_whatever_the_memory() -> None:
    values = _random_bytes(4 * 30).view(np.float32).reshape(5, 6)
    tensor = torch.from_numpy(values)
    assert digest(values.T) == digest(np.ascontiguousarray(values.T)) == digest(tensor.T) != digest(values)
    assert digest(values.astype(">f4").copy()) == digest(values.astype("<f4"))
    numbers = torch.from_numpy(_random_bytes(16 * 5)).view(torch.complex64)
    assert digest(numbers.conj()) == digest(numbers.conj().resolve_conj())


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_controls_a_swap_a_flipped_bit_and_a_shift_are_seen(width: int) -> None:
    values = _random_bytes(width * 50).view(f"u{width}")
    values[3], values[4] = 1, 2
    whole = digest(values)
    swapped, flipped = values.copy(), values.copy()
    swapped[[3, 4]] = values[[4, 3]]
    assert digest(swapped) != whole
    for bit in range(8 * width):
        flipped[17] = values[17] ^ values.dtype.type(1 << bit)
        changed = digest(flipped)
        assert changed.lanes[0] != whole.lanes[0]
        assert changed.lanes[1] != whole.lanes[1]
    assert digest(values, offset=1) != whole
    assert digest(values[:-1]) != whole


def test_bits_decide_and_not_values() -> None:
    zeros, negative = np.zeros(4, np.float32), -np.zeros(4, np.float32)
    assert np.array_equal(zeros, negative)
    assert digest(zeros) != digest(negative)
    quiet, payload = (np.array([bits], np.uint32).view(np.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert digest(quiet) != digest(payload)
    assert len({digest(np.zeros(4, kind)) for kind in ("u1", "u2", "u4", "u8", "c16")}) == 5, "the width counts"
    assert digest(np.zeros(3, np.uint8)) != digest(np.zeros(4, np.uint8)), "zeros count"


def test_text() -> None:
    value = digest(np.arange(5))
    assert Digest.from_text(str(value)) == value
    assert sum([value, value]) == value + value
    for wrong in ("", "12", "g" * 32, "A" * 32, str(value) + "\n"):
        with pytest.raises(UsageError, match="32 hexadecimal"):
            Digest.from_text(wrong)


def test_what_has_no_specified_bits_is_refused() -> None:
    refused = [
        np.array([object()]),
        np.zeros(2, np.longdouble),
        np.array(["text"]),
        np.zeros(2, [("a", "f4")]),
        torch.zeros(2, device="meta"),
        torch.eye(3).to_sparse(),
        "text",
    ]
    for values in refused:
        with pytest.raises(UnsupportedError, match="digest"):
            digest(values)


def test_places_that_do_not_fit_are_refused() -> None:
    values = np.zeros(6, np.float32)
    with pytest.raises(UsageError, match="offset"):
        digest(values, offset=-1)
    with pytest.raises(UsageError, match="not both"):
        digest(values, offset=1, indices=np.arange(6))
    with pytest.raises(UsageError, match="expected shape"):
        digest(values, indices=np.arange(5))
    with pytest.raises(UsageError, match="below zero"):
        digest(values, indices=np.arange(6) - 1)
    with pytest.raises(UsageError, match="grid of 5 elements"):
        digest(values, indices=Grid((range(5),), (9,)))
    with pytest.raises(UsageError, match=r"indices in \[0, 9\)"):
        Grid((range(5, 11),), (9,))
    with pytest.raises(UsageError, match=r"indices in \[0, 9\)"):
        Grid((np.array([1, 9]),), (9,))
    with pytest.raises(UsageError, match="2 axes"):
        Grid((range(5), range(2)), (9,))
