# SPDX-License-Identifier: Apache-2.0
"""Megatron Core trains on detcomm: the same bits whatever the buckets, overlap, schedule, transport and placement.

A selection that covers layouts, precisions and variations; the whole product is `scripts/megatron-matrix`.
"""

import pytest

from tests.multiprocess import megatron_cases as cases

cases.need_megatron()

ALL_AT_ONCE = cases.Variation(
    "all at once",
    cases.BUCKETS_3000.arguments,
    {**cases.TCP.env, "DETCOMM_CHUNK_BYTES": "4096"},
    moved=True,
)
"""Buckets, overlap, schedule, transport and placement, all other than in the first run."""


def _layout(name: str) -> cases.Layout:
    return next(layout for layout in cases.LAYOUTS if layout.name == name)


DP4 = _layout("DP4")
AVERAGED = cases.Layout("DP4, AVG", 4, ("--distributed-optimizer", "--exact-norm", "--average-in-collective"))
INTERLEAVED = cases.Layout("TP2 x PP2", 4, ("--tp", "2", "--sp", "--pp", "2", "--vpp", "2"))

COVERING = (
    (DP4, "fp32"),
    (AVERAGED, "bf16, bf16 gradients"),
    (_layout("TP4"), "fp32"),
    (INTERLEAVED, "fp32"),
    (_layout("EP2, all-to-all"), "bf16, bf16 gradients"),
    (_layout("EP4, all-gather"), "fp32"),
    (_layout("DP2 x TP2 x PP2"), "bf16, fp32 gradients"),
)


@pytest.mark.parametrize(("layout", "precision"), COVERING, ids=lambda value: getattr(value, "name", value))
def test_the_bits_do_not_change_with_how_it_is_done(layout: cases.Layout, precision: str) -> None:
    assert cases.bits(cases.train(layout, precision)) == cases.bits(cases.train(layout, precision, ALL_AT_ONCE))


def test_stock_gloo_does_change_them() -> None:
    """The negative control: the same trainings on gloo."""
    whole = cases.train(DP4, backend="gloo")
    buckets = cases.train(DP4, variation=cases.BUCKETS_3000, backend="gloo")
    assert cases.bits(whole, "gradients") != cases.bits(buckets, "gradients")


def test_megatrons_norm_brings_the_bucket_size_back_in_after_the_gradients() -> None:
    whole = cases.train(cases.CLIPPED)
    buckets = cases.train(cases.CLIPPED, variation=cases.BUCKETS_3000)
    assert float.fromhex(whole[0]["gradient_norm"]) > 1.0, "clipping must be active to show anything"
    assert cases.bits(whole, "gradients")[0] == cases.bits(buckets, "gradients")[0]
