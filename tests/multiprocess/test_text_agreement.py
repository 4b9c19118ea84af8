# SPDX-License-Identifier: Apache-2.0
"""Ranks that are about to make different calls on CUDA tensors learn it before anything is issued, and go on."""

from datetime import timedelta

import torch.distributed as dist

from detcomm import stock_gloo, text_agreement
from detcomm.errors import MismatchError
from detcomm.splits import Splits
from tests import launch

Said = tuple[str, Splits | None]


def _agree(rank: int, world_size: int, said: list[list[Said]]) -> list[str]:
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    inner = stock_gloo.connect_mesh(stock_gloo.open_devices(), store, "agree", rank, world_size, timedelta(seconds=60))
    results = []
    for text, splits in said[rank]:
        try:
            text_agreement.agree(inner, text, splits)
            results.append("")
        except MismatchError as error:
            results.append(str(error))
    dist.destroy_process_group()
    return results


def test_all_agree_or_all_raise_one_text_and_stay_in_step() -> None:
    said: list[list[Said]] = [[("a", None), (f"sum[{size}]", None), ("c", None)] for size in (3, 3, 4)]
    results = launch.run(3, _agree, said)
    expected = "the ranks disagree on a call of CUDA tensors; ranks 0, 1: sum[3]; rank 2: sum[4]"
    assert results == [["", expected, ""]] * 3


def test_splits_are_compared_pair_by_pair() -> None:
    fit = [Splits([rank + peer for peer in range(3)], [rank + peer for peer in range(3)]) for rank in range(3)]
    differ = [*fit[:2], Splits([2, 3, 4], [2, 7, 4])]
    said: list[list[Said]] = [[("x", fit[rank]), ("x", differ[rank]), ("y", fit[rank])] for rank in range(3)]
    results = launch.run(3, _agree, said)
    expected = "rank 1 sends 3 bytes to rank 2, which expects 7"
    assert all(first == last == "" and second.endswith(expected) for first, second, last in results), results
