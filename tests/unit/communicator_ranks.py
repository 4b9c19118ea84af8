# SPDX-License-Identifier: Apache-2.0
"""Communicators over loopback, one a rank, for the tests of ``communicator.py`` and ``agreement.py``."""

from collections.abc import Callable
from contextlib import closing

import numpy as np

from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.communicator import Communicator
from detcomm.options import Options
from detcomm.transports import loopback
from detcomm.transports.base import Bytes
from detcomm.transports.loopback import LoopbackTransport
from tests import inputs, oracle

PATIENCE_S = 60.0
COUNT = 331  # prime: shards and chunks are ragged


def run_ranks(
    world_size: int, body: Callable[[Communicator], object], options: Options | None = None, **more: object
) -> list[object]:
    def on_rank(transport: LoopbackTransport) -> object:
        with closing(Communicator(transport, options or Options(), 2, "test")) as communicator:
            return body(communicator)

    return loopback.run(world_size, on_rank, **more)


def all_reduce(count: int = COUNT, op: ReduceOp = ReduceOp.SUM, dtype: DType = DType.FLOAT32) -> Call:
    return Call(Collective.ALL_REDUCE, dtype, count, op)


def untouched(num_bytes: int) -> Bytes:
    return np.full(num_bytes, 0xA5, dtype=np.uint8)


def check_group_works(communicator: Communicator) -> None:
    contributions = inputs.make("float32", COUNT, communicator.world_size, seed=10)
    own = inputs.bits(contributions[communicator.rank]).copy()
    communicator.run(all_reduce(), own, own, timeout_s=PATIENCE_S)
    np.testing.assert_array_equal(own, inputs.bits(oracle.reduce(contributions, "float32", "sum")))
