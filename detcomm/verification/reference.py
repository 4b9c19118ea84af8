# SPDX-License-Identifier: Apache-2.0
"""The bits that a reduction must have: one portable fold over all ranks' contributions, in leaf order.

Uses neither planner, transport nor native library: an error there cannot be here too.
"""

from collections.abc import Sequence

import numpy as np

from detcomm.association import Association
from detcomm.collectives import Accumulate, DType, ReduceOp
from detcomm.fold_spec import FoldSpec
from detcomm.portable_fold import portable_fold, portable_premultiply
from detcomm.transports.base import Bytes


def expected_bits(
    association: Association,
    accumulate: Accumulate,
    op: ReduceOp,
    dtype: DType,
    inputs: Sequence[Bytes],
    factors: Sequence[float],
) -> Bytes:
    """The result of an all-reduce.

    Args:
        inputs: the contributions by rank, all of one length.
        factors: by rank; of a PREMUL_SUM alone.
    """
    dtype = dtype.real
    if op is ReduceOp.PREMUL_SUM:
        inputs = [_premultiplied(dtype, factor, data) for data, factor in zip(inputs, factors, strict=True)]
    world_size = len(inputs)
    if world_size == 1:
        return inputs[0].copy()
    spec = FoldSpec(op, dtype, accumulate, association.shape, (True,) * world_size, True, world_size)
    elements = [data.reshape(-1, dtype.itemsize) for data in inputs]
    output = np.empty_like(elements[0])
    positions = np.arange(len(output))
    num_classes = association.num_classes(world_size)
    classes = positions // association.ring_chunk_elems % num_classes
    for element_class in range(num_classes):
        mine = positions[classes == element_class]
        if not len(mine):
            continue
        leaves = [elements[rank][mine].reshape(-1) for rank in association.leaf_order(world_size, element_class)]
        result = np.empty_like(leaves[0])
        portable_fold(spec, leaves, result)
        output[mine] = result.reshape(-1, dtype.itemsize)
    return output.reshape(-1)


def _premultiplied(dtype: DType, factor: float, data: Bytes) -> Bytes:
    output = np.empty_like(data)
    portable_premultiply(dtype, factor, data, output)
    return output
