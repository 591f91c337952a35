"""The codec gives back what it was given, keeps its format, and answers any bytes with a value or `BadRequest`."""

from __future__ import annotations

import pathlib
import sys
from dataclasses import replace
from typing import get_args

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub import messages as m
from tensorhub import types as t
from tensorhub.errors import BadRequest
from tensorhub.wire import codec
from tests.support.message_strategies import CALL_IDS, MESSAGES, answers, calls, instances
from tests.unit.wire.examples import example

GOLDEN = pathlib.Path(__file__).with_name("golden.txt")
SELECTORS = get_args(t.Selector)
SEAT = t.Seat(t.ModelKey("job", "actor"), t.ReplicaId("r"), 0)
REPLICATE = m.Replicate(SEAT, "a", 1, 2, t.Latest(), 3, t.Generation(b"g" * 16))


def golden_lines() -> list[str]:
    """`tag name bytes` of the example of every message, and of `Replicate` with every selector."""
    lines = []
    for cls in MESSAGES:
        body = example(cls)
        data = codec.encode_call(m.Call(7, body)) if cls in get_args(m.Request) else None
        data = data or codec.encode_answer(m.Answer(7, body))
        lines.append(f"{codec.TAGS[cls]} {cls.__name__} {data.hex()}")
    for cls in SELECTORS:
        data = codec.encode_call(m.Call(7, replace(REPLICATE, selector=cls(9))))
        lines.append(f"{codec.TAGS[cls]} {cls.__name__} {data.hex()}")
    return lines


@pytest.mark.parametrize("line", GOLDEN.read_text().splitlines(), ids=lambda line: line.split()[1])
def test_format_is_frozen(line: str) -> None:
    """Tags and field order of every message are the format: the bytes of yesterday's peer stay readable."""
    assert line in golden_lines()


def test_golden_bytes_cover_every_message() -> None:
    """A message without golden bytes could change its format unseen."""
    assert len(GOLDEN.read_text().splitlines()) == len(golden_lines())


def test_tags_name_every_message_once() -> None:
    """Every message and selector has a tag of its own, and nothing else has one."""
    assert set(codec.TAGS) == {*MESSAGES, *SELECTORS}
    assert len(set(codec.TAGS.values())) == len(codec.TAGS)


@pytest.mark.slow
@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_round_trip(cls: type) -> None:
    """What is decoded equals what was encoded, in value and in type, for every message class."""

    @settings(max_examples=15, deadline=None)
    @given(instances(cls), CALL_IDS)
    def check(body: object, call_id: int) -> None:
        if cls in get_args(m.Request):
            assert codec.decode_call(codec.encode_call(m.Call(call_id, body))) == m.Call(call_id, body)
        else:
            assert codec.decode_answer(codec.encode_answer(m.Answer(call_id, body))) == m.Answer(call_id, body)

    check()


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.one_of(calls.map(codec.encode_call), answers.map(codec.encode_answer)),
    st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=4),
    st.integers(0, 8),
    st.binary(max_size=4),
)
def test_mutated_bytes_give_a_value_or_bad_request(
    data: bytes, flips: list[tuple[int, int]], cut: int, tail: bytes
) -> None:
    """Flipped, cut and lengthened frames never raise anything but `BadRequest`, and what passes encodes again."""
    mutated = bytearray(data[: len(data) - cut] + tail) or bytearray(b"\x00")
    for position, value in flips:
        mutated[position % len(mutated)] = value
    for decode, encode in ((codec.decode_call, codec.encode_call), (codec.decode_answer, codec.encode_answer)):
        try:
            value = decode(bytes(mutated))
        except BadRequest:
            continue
        assert decode(encode(value)) == value
    assert 0 <= codec.call_id_of(bytes(mutated)) <= codec.CALL_ID_MAX


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_give_a_value_or_bad_request(data: bytes) -> None:
    """Noise never raises anything but `BadRequest`."""
    for decode in (codec.decode_call, codec.decode_answer):
        try:
            value = decode(data)
        except BadRequest:
            continue
        assert type(value) in (m.Call, m.Answer)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(codec.TAGS.values())),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary()),
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
        max_leaves=12,
    ),
)
def test_well_formed_msgpack_of_wrong_types_gives_a_value_or_bad_request(tag: int, fields: object) -> None:
    """Valid msgpack with wrong types, counts or nesting is refused by reason, never accepted in another shape."""
    data = msgpack.packb((1, (tag, *fields) if isinstance(fields, list) else (tag, fields)))
    for decode, encode in ((codec.decode_call, codec.encode_call), (codec.decode_answer, codec.encode_answer)):
        try:
            value = decode(data)
        except BadRequest:
            continue
        assert decode(encode(value)) == value


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ((1, (14, None, None)), "List has 1 fields, not 2"),
        ((1, (14, ("job",))), "List.model: ModelKey has 2 fields"),
        ((1, (14, ("job", 5))), "List.model: ModelKey.name: expected str, not int"),
        ((1, (17, True)), "Unwatch.call: expected int, not bool"),
        ((1, (17, 2**63)), "Unwatch.call: 9223372036854775808 takes more than 64 bits"),
        ((1, (17, 1.0)), "Unwatch.call: expected int, not float"),
        ((1, (2, b"short")), "Beat.session: expected SessionId of 16 bytes"),
        ((1, (99,)), "unknown tag 99"),
        ((1, (65,)), "unknown tag 65"),
        ((1, ()), "starts with a tag"),
        ((1, 14), "starts with a tag"),
        ((-1, (19,)), "a call's id"),
        ((True, (19,)), "a call's id"),
        ((1, (19,), 2), "an array of an id and a message"),
        ({1: 2}, "not a msgpack frame"),
        ((1, (14, msgpack.Timestamp(1))), "not a msgpack frame"),
    ],
)
def test_refusals_name_field_and_reason(frame: object, reason: str) -> None:
    """A refused frame says which field is wrong and how; replies are no requests; a bool is no int."""
    with pytest.raises(BadRequest) as caught:
        codec.decode_call(msgpack.packb(frame))
    assert reason in str(caught.value)


def test_arrays_announced_larger_than_a_call_needs_are_refused() -> None:
    """The parser never allocates what a hostile header announces."""
    with pytest.raises(BadRequest, match="msgpack"):
        codec.decode_call(b"\xdd\xff\xff\xff\xff" * 8)
    with pytest.raises(BadRequest, match="exceeds max_array_len"):
        codec.decode_call(msgpack.packb((1, (14, [0] * (codec.CALL_ARRAY_MAX + 1)))))


def test_deep_nesting_is_refused() -> None:
    """A frame of nothing but opening arrays ends in `BadRequest`, not in a stack overflow."""
    with pytest.raises(BadRequest):
        codec.decode_call(b"\x91" * 100_000)


def test_sizes_are_bounded_both_ways() -> None:
    """No frame above the limit is made or read; a single text is bounded, too."""
    with pytest.raises(BadRequest, match="a frame holds"):
        codec.encode_call(m.Call(1, m.Abort(SEAT, 1, 1, "x" * codec.FRAME_BYTES_MAX)))
    with pytest.raises(BadRequest, match="is the most"):
        codec.decode_call(bytes(codec.FRAME_BYTES_MAX + 1))
    with pytest.raises(BadRequest, match="exceeds max_str_len"):
        codec.decode_call(codec.encode_call(m.Call(1, m.Abort(SEAT, 1, 1, "x" * (codec.TEXT_BYTES_MAX + 1)))))


@pytest.mark.parametrize(
    "request_", [m.Unwatch(2**64), m.Abort(SEAT, 1, 1, "\ud800"), object()], ids=["int", "text", "x"]
)
def test_what_has_no_bytes_is_refused_at_the_sender(request_: object) -> None:
    """An int beyond 64 bits, text that is no Unicode and strangers never reach the wire."""
    with pytest.raises(BadRequest):
        codec.encode_call(m.Call(1, request_))


def test_caller_of_an_unreadable_call_is_known() -> None:
    """The id survives a body that does not decode, so that its caller can be told."""
    assert codec.call_id_of(msgpack.packb((5, (99, "future")))) == 5
    assert codec.call_id_of(b"\xc1") == 0
    assert codec.call_id_of(b"") == 0


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(golden_lines()) + "\n")
    sys.exit(0)
