# SPDX-License-Identifier: Apache-2.0
"""Policies over Megatron's groups: text and value, first rule that fits, and what is refused."""

import pytest

from detcomm.errors import UsageError
from detcomm.megatron.inventory import SHORT_NAMES, TRAFFIC, patterns_of, traffic_of
from detcomm.megatron.policy import FIXED, STOCK, Policy, Rule
from detcomm.options import Options

DP_AND_TP = "dp,tp=fixed; *=stock"


def test_without_rules_every_group_is_fixed_order() -> None:
    for description in ("TENSOR_MODEL_PARALLEL_GROUP", "NEW_GROUP", None):
        assert Policy().choose(description) == FIXED


@pytest.mark.parametrize(
    ("description", "choice"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", FIXED),
        ("DATA_PARALLEL_GROUP_WITH_CP", FIXED),
        ("INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", FIXED),
        ("PIPELINE_MODEL_PARALLEL_GROUP", STOCK),
        ("EXPERT_MODEL_PARALLEL_GROUP", STOCK),
        ("EXPERT_DATA_PARALLEL_GROUP", STOCK),
        ("WORLD", STOCK),
    ],
)
def test_short_names_stand_for_their_groups_and_the_first_rule_decides(description: str, choice: str) -> None:
    assert Policy.parse(DP_AND_TP).choose(description) == choice
    assert Policy.of(dp=FIXED, tp=FIXED).choose(description) == FIXED


def test_a_rule_may_name_options() -> None:
    policy = Policy.parse(
        "CONTEXT_PARALLEL_GROUP=fixed(association=ring, ring_chunk_elems=4096, schedule=staged(8,32)); cp=stock"
    )
    assert policy.choose("CONTEXT_PARALLEL_GROUP") == Options(
        association="ring", ring_chunk_elems=4096, schedule="staged(8,32)"
    )
    assert policy.choose("HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L0") == STOCK


@pytest.mark.parametrize(
    "text", ["", "pp=stock; ep=stock", DP_AND_TP, "tp=fixed(association=linear, accumulate=wire, timeout=7)"]
)
def test_the_text_of_a_policy_is_the_policy(text: str) -> None:
    policy = Policy.parse(text)
    again = Policy.parse(str(policy))
    descriptions = [traffic.pattern.replace("*", "1") for traffic in TRAFFIC]
    assert [again.choose(name) for name in descriptions] == [policy.choose(name) for name in descriptions]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp", "expected GROUPS=fixed"),
        ("dp,=stock", "expected GROUPS=fixed"),
        ("dp=nccl", "expected fixed, stock or fixed"),
        ("TENSOR_MODEL_PARALEL_GROUP=stock", "TENSOR_MODEL_PARALLEL_GROUP"),
        ("TENSOR_PARALLEL_*=stock", "no group of Megatron fits"),
        ("dp=fixed(order=ring)", "expected OPTION=VALUE"),
        ("dp=fixed(association=rings)", "association"),
        ("dp=fixed(chunk_bytes=many)", "CHUNK_BYTES"),
    ],
)
def test_what_does_not_parse_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Policy.parse(text)


def test_a_group_of_an_unknown_megatron_is_never_left_stock_by_a_wildcard() -> None:
    policy = Policy.parse(DP_AND_TP)
    for description in ("NEW_GRADIENT_GROUP", None):
        with pytest.raises(UsageError, match="does not know what goes"):
            policy.choose(description)


def test_rules_without_a_group_are_found() -> None:
    policy = Policy.parse("cp=stock; tp=fixed")
    assert policy.unused(["TENSOR_MODEL_PARALLEL_GROUP", "WORLD"]) == (Rule("cp", STOCK),)


def test_short_names_share_no_group() -> None:
    patterns = [pattern for name in SHORT_NAMES for pattern in patterns_of(name)]
    assert len(patterns) == len(set(patterns))
    for traffic in TRAFFIC:
        assert traffic_of(traffic.pattern.replace("*", "1")) == traffic, "an earlier pattern hides this one"
