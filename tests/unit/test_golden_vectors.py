# SPDX-License-Identifier: Apache-2.0
"""The vectors that ship: made from the oracle alone, complete, able to fail, and kept by folds, plans and executor."""

import subprocess
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from detcomm import golden_vectors, testing
from detcomm.collectives import DType, ReduceOp, is_legal
from detcomm.fold import FoldSpec, fold, premultiply
from detcomm.golden_vectors import GoldenCase
from detcomm.transports.base import Bytes

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 700_000


def _shipped() -> dict[str, bytes]:
    entries = resources.files(golden_vectors).iterdir()
    return {entry.name: entry.read_bytes() for entry in entries if entry.name.endswith(".json")}


def _fold_all(case: GoldenCase) -> list[Bytes]:
    """Every element by one fold over all leaves: no plan, no transport."""
    dtype = case.dtype.real
    leaves = list(case.inputs)
    if case.factors is not None:
        leaves = [leaf.copy() for leaf in leaves]
        for leaf, factor in zip(leaves, case.factors, strict=True):
            premultiply(dtype, factor, leaf, leaf)
    if case.world_size == 1:
        return leaves
    output = np.empty_like(case.expected)
    count = output.size // dtype.itemsize
    for index in range(count):
        element = slice(index * dtype.itemsize, (index + 1) * dtype.itemsize)
        element_class = case.association.element_class(index, case.world_size)
        order = case.association.leaf_order(case.world_size, element_class)
        spec = FoldSpec(
            ReduceOp.SUM if case.op is ReduceOp.PREMUL_SUM else case.op,
            dtype,
            case.accumulate,
            case.association.shape,
            (True,) * case.world_size,
            True,
            case.world_size,
        )
        fold(spec, [leaves[rank][element] for rank in order], output[element])
    return [output]


def test_the_files_are_made_again_byte_for_byte(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_golden_vectors"), str(tmp_path)], check=True, timeout=300
    )
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == _shipped()


def test_they_are_small_enough_to_ship() -> None:
    assert sum(map(len, _shipped().values())) < MAX_BYTES


def test_they_cover_every_id_type_operation_and_world_size() -> None:
    expected = {f"{name}/1:{mode}" for name in ("tree", "linear") for mode in ("float32", "wire")}
    expected |= {f"ring/1[{chunk}]:{mode}" for chunk in (3, 65536) for mode in ("float32", "wire")}
    assert set(golden_vectors.numerics_ids()) == expected
    legal = {(dtype, op) for dtype in DType for op in ReduceOp if is_legal(op, dtype)}
    for numerics_id in expected:
        seen: dict[int, set[tuple[DType, ReduceOp]]] = {}
        for case in golden_vectors.cases(numerics_id):
            assert case.association.numerics_id(case.accumulate) == numerics_id
            seen.setdefault(case.world_size, set()).add((case.dtype, case.op))
        assert seen == dict.fromkeys((1, 2, 3, 4, 5, 7, 8), legal)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16, DType.FLOAT16])
def test_another_association_has_other_bits(dtype: DType) -> None:
    def sums(numerics_id: str, world_size: int) -> bytes:
        wanted = (dtype, ReduceOp.SUM, world_size)
        (found,) = (c for c in golden_vectors.cases(numerics_id) if (c.dtype, c.op, c.world_size) == wanted)
        return found.expected.tobytes()

    for world_size in (4, 5, 7, 8):
        distinct = {
            sums(f"{name}/1{mode}", world_size) for name in ("tree", "linear") for mode in (":float32", ":wire")
        }
        distinct.add(sums("ring/1[3]:float32", world_size))
        assert len(distinct) == (5 if dtype in (DType.BFLOAT16, DType.FLOAT16) else 3)


@pytest.mark.parametrize("numerics_id", golden_vectors.numerics_ids())
def test_folds_keep_them(numerics_id: str) -> None:
    assert testing.check_golden(_fold_all, numerics_id=numerics_id) > 500


@pytest.mark.parametrize("numerics_id", golden_vectors.numerics_ids())
def test_planner_and_executor_keep_them(numerics_id: str) -> None:
    assert testing.check_golden(numerics_id=numerics_id) > 500


def test_a_wrong_bit_is_named() -> None:
    def reduce(case: GoldenCase) -> Sequence[Bytes]:
        result = case.expected.copy()
        if case.dtype is DType.BFLOAT16 and case.op is ReduceOp.AVG and case.world_size == 5:
            result[2 * 6] ^= 1
        return [result]

    with pytest.raises(AssertionError) as caught:
        testing.check_golden(reduce, numerics_id="tree/1:wire")
    text = str(caught.value)
    assert text.startswith("tree/1:wire avg bfloat16 of 5 ranks, element 6 on rank 0: expected 0x"), text
    assert "got 0x" in text
