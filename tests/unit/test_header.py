# SPDX-License-Identifier: Apache-2.0
"""Headers keep every field, have one layout, and turn a difference into words."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detcomm.call import Call
from detcomm.collectives import Collective, DType, ReduceOp
from detcomm.header import (
    HEADER_BYTES,
    Header,
    call_text,
    describe_difference,
    digest,
    header_for,
    header_of_movement,
    ranks_text,
    with_sequence,
)
from detcomm.movement_call import MOVEMENTS, MovementCall

_digests = st.binary(min_size=16, max_size=16)
_names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=32)
_counts = st.integers(0, 2**64 - 1)

headers = st.builds(
    Header,
    collective=st.sampled_from([*(collective.value for collective in Collective), *MOVEMENTS]),
    op=st.sampled_from(["", *(op.value for op in ReduceOp)]),
    dtype=_names,
    count=_counts,
    root=st.integers(0, 2**32 - 1),
    shards=_digests,
    num_calls=st.integers(1, 2**32 - 1),
    calls=_digests,
    texts_bytes=st.integers(0, 2**32 - 1),
    numerics_id=_names,
    schedule=_digests,
    options=_digests,
    sequence=_counts,
)

CALL = Call(Collective.ALL_REDUCE, DType.FLOAT32, 1000, ReduceOp.SUM)


def example(**changes: object) -> Header:
    header = header_for(
        [CALL], [""], numerics_id="tree/1:float32", schedule_fingerprint="a1", options=digest("options")
    )
    return replace(header, **changes)


@given(headers)
def test_every_field_survives(header: Header) -> None:
    encoded = header.encode()
    assert len(encoded) == HEADER_BYTES
    assert Header.decode(encoded) == header


@given(headers, _counts)
def test_the_sequence_number_can_be_set_in_an_encoded_header(header: Header, sequence: int) -> None:
    assert with_sequence(header.encode(), sequence) == replace(header, sequence=sequence).encode()


@given(headers, headers)
def test_different_headers_have_different_bytes(left: Header, right: Header) -> None:
    assert (left == right) == (left.encode() == right.encode())


def test_the_layout_is_frozen() -> None:
    encoded = example(sequence=3).encode()
    assert encoded[:16] == b"detcomm\0" + bytes([1, 0, 1, 1, 0, 0, 0, 0])
    assert encoded[16:32] == (3).to_bytes(8, "little") + (1000).to_bytes(8, "little")
    assert encoded[104:136].rstrip(b"\0") == b"float32"
    assert encoded[136:200].rstrip(b"\0") == b"tree/1:float32"
    assert encoded[200:] == bytes(56)


@pytest.mark.parametrize(
    ("name", "number", "text"),
    [
        ("broadcast", 5, "broadcast(int8[6], root 2)"),
        ("gather", 6, "gather(int8[6], root 2)"),
        ("scatter", 7, "scatter(int8[6], root 2)"),
        ("all_to_all", 8, "all_to_all(int8)"),
        ("barrier", 9, "barrier(int8)"),
    ],
)
def test_the_header_of_a_movement_is_frozen_and_says_what_is_moved(name: str, number: int, text: str) -> None:
    header = header_of_movement(MovementCall(name, "int8", 6, 2), "tree/1:float32", digest("options"))
    encoded = header.encode()
    assert encoded[10:16] == bytes([number, 0, 2, 0, 0, 0])
    assert encoded[24:32] == (6).to_bytes(8, "little")
    decoded = Header.decode(encoded)
    assert decoded is not None
    assert decoded.text() == text
    other = example().encode()
    assert describe_difference([encoded, other]).endswith(f"rank 0: {text}; rank 1: all_reduce(sum, float32[1000])")


@pytest.mark.parametrize("data", [bytes(HEADER_BYTES), b"detcomm\0\2" + bytes(247), b"\xff" * HEADER_BYTES])
def test_what_is_no_header_of_this_version_is_not_taken_for_one(data: bytes) -> None:
    assert Header.decode(data) is None


_CHANGES = [
    ({"count": 999}, "count", "all_reduce(sum, float32[999])"),
    ({"dtype": "bfloat16"}, "dtype", "all_reduce(sum, bfloat16[1000])"),
    ({"op": "max"}, "operation", "all_reduce(max, float32[1000])"),
    ({"collective": "reduce_scatter"}, "collective", "reduce_scatter(sum, float32[1000])"),
    ({"shards": digest("other")}, "shards", digest("other").hex()[:12]),
    ({"numerics_id": "ring/1[65536]:float32"}, "numerics", "ring/1[65536]:float32"),
    ({"schedule": digest("b2")}, "schedule", digest("b2").hex()[:12]),
    ({"options": digest("others")}, "options", digest("others").hex()[:12]),
    ({"sequence": 8}, "sequence number", "sequence number 8"),
    ({"num_calls": 3}, "number of calls", "and 2 more calls"),
]


@pytest.mark.parametrize(("changes", "field", "said"), _CHANGES)
@pytest.mark.parametrize("world_size", [3, 4, 5])
def test_a_difference_names_the_field_the_ranks_and_both_values(
    world_size: int, changes: dict[str, object], field: str, said: str
) -> None:
    for odd in range(world_size):
        encoded = [example(**(changes if rank == odd else {})).encode() for rank in range(world_size)]
        text = describe_difference(encoded)
        others = [rank for rank in range(world_size) if rank != odd]
        assert text.startswith(f"the ranks disagree on {field}: ")
        assert f"rank {odd}: " in text
        assert said in text.split(f"rank {odd}: ")[1]
        assert f"{ranks_text(others)}: all_reduce(sum, float32[1000])" in text


def test_every_field_has_a_case() -> None:
    covered = {name for changes, _, _ in _CHANGES for name in changes}
    # The digest and the length of the calls' texts have no words of their own; root is said by reduce alone.
    assert covered == {field.name for field in fields(Header)} - {"calls", "texts_bytes", "root"}


def test_the_root_of_a_reduce_is_said() -> None:
    calls = [Call(Collective.REDUCE, DType.INT8, 5, ReduceOp.MIN, root=root) for root in (0, 0, 2)]
    encoded = [
        header_for([call], [""], numerics_id="n", schedule_fingerprint="", options=bytes(16)).encode() for call in calls
    ]
    assert describe_difference(encoded) == (
        "the ranks disagree on root: ranks 0, 1: reduce(min, int8[5], root 0); rank 2: reduce(min, int8[5], root 2)"
    )


def test_another_version_is_said() -> None:
    other = example().encode()[:8] + b"\2\0" + example().encode()[10:]
    text = describe_difference([example().encode(), other, example().encode()])
    assert text == (
        "the ranks disagree on the format of headers: ranks 0, 2: all_reduce(sum, float32[1000]); "
        "rank 1: no header of this version of detcomm"
    )


def test_the_text_of_a_call_says_everything() -> None:
    shards = Call(Collective.REDUCE_SCATTER, DType.FLOAT32, 6, ReduceOp.SUM, shard_counts=(1, 2, 3))
    assert call_text(shards, "complex64") == "reduce_scatter(sum, float32[6]) of complex64 shards 1,2,3"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1], "ranks 0, 1"), ([0, 2, 3, 4, 5], "ranks 0, 2-5"), ([0, 1, 2], "ranks 0-2")],
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text
