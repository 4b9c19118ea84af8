# SPDX-License-Identifier: Apache-2.0
"""The end of a group on the GPU: what fails or does not end is aborted, what is done is closed."""

from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore

from detcomm.cuda.group import CudaGroup
from detcomm.errors import TransportError
from detcomm.options import Options


class _Calls:
    """In place of a communicator or a stock group: what it is told."""

    has_captured = False

    def __init__(self, oldest: Any = None) -> None:
        self.oldest = oldest
        self.told: list[str] = []

    def abort(self) -> None:
        self.told.append("abort")

    def close(self) -> None:
        self.told.append("close")

    def shutdown(self) -> None:
        self.told.append("shutdown")

    def poll(self) -> None:
        pass


def _group(options: Options, oldest: Any = None) -> tuple[CudaGroup, Any, Any]:
    communicator: Any = _Calls(oldest)
    movement: Any = _Calls()
    timeout = timedelta(seconds=60)
    group = CudaGroup("g", 0, 2, options, 1, HashStore(), timeout, lambda error: None, lambda: None)
    group._communicator, group._movement = communicator, movement
    return group, communicator, movement


@pytest.mark.parametrize("path", ["native", "reference"])
def test_a_failure_aborts_whoever_waits_for_peers(path: str) -> None:
    options = Options(cuda_path=path, cuda_on_error="raise")
    group, communicator, movement = _group(options, oldest="a call")
    group.fail(TransportError("a peer is gone"))
    assert communicator.told == ["abort"]
    assert movement.told == (["abort"] if path == "reference" else [])


def test_what_is_done_is_closed_in_good_order() -> None:
    group, communicator, movement = _group(Options())
    assert group.close(patience_s=1.0)
    assert (communicator.told, movement.told) == (["close"], ["shutdown"])


def test_what_does_not_end_is_aborted() -> None:
    group, communicator, movement = _group(Options(), oldest="a call")
    assert not group.close(patience_s=0.01)
    assert (communicator.told, movement.told) == (["abort"], ["abort"])
