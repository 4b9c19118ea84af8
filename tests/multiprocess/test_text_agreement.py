# SPDX-License-Identifier: Apache-2.0
"""Ranks that are about to make different calls on CUDA tensors learn it before anything is issued, and go on."""

from datetime import timedelta

import torch.distributed as dist

from detcomm import stock_gloo, text_agreement
from detcomm.errors import MismatchError
from tests import launch


def _agree(rank: int, world_size: int, texts: list[list[str]]) -> list[str]:
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    inner = stock_gloo.connect_mesh(stock_gloo.open_devices(), store, "agree", rank, world_size, timedelta(seconds=60))
    results = []
    for text in texts[rank]:
        try:
            text_agreement.agree(inner, text)
            results.append("")
        except MismatchError as error:
            results.append(str(error))
    dist.destroy_process_group()
    return results


def test_all_agree_or_all_raise_one_text_and_stay_in_step() -> None:
    texts = [["a", "sum[3]", "c"], ["a", "sum[3]", "c"], ["a", "sum[4]", "c"]]
    results = launch.run(3, _agree, texts)
    expected = "the ranks disagree on a call of CUDA tensors; ranks 0, 1: sum[3]; rank 2: sum[4]"
    assert results == [["", expected, ""]] * 3
