"""Protobuf frames mirror the dataclasses, keep their format, and answer any bytes with a value or `BadRequest`."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub import messages as m
from tensorhub import types as t
from tensorhub.client.grpc_channel import FRAME_BYTES_MAX
from tensorhub.errors import BadRequest
from tensorhub.wire import codec, proto
from tensorhub.wire import reference_pb2 as pb
from tensorhub.wire.grpc_names import METHOD, SERVICE
from tests.support.message_strategies import CALL_IDS, MESSAGES, answers, calls, instances
from tests.unit.wire.examples import example

GOLDEN = pathlib.Path(__file__).with_name("golden_proto.txt")
SELECTORS = get_args(t.Selector)
SEAT = t.Seat(t.ModelKey("job", "actor"), t.ReplicaId("r"), 0)
REPLICATE = m.Replicate(SEAT, "a", 1, 2, t.Latest(), 3, t.Generation(b"g" * 16))


def golden_lines() -> list[str]:
    """`name bytes` of the example of every message, and of `Replicate` with every selector."""
    lines = []
    for cls in MESSAGES:
        body = example(cls)
        data = proto.encode_call(m.Call(7, body)) if cls in get_args(m.Request) else None
        data = data or proto.encode_answer(m.Answer(7, body))
        lines.append(f"{cls.__name__} {data.hex()}")
    for cls in SELECTORS:
        data = proto.encode_call(m.Call(7, replace(REPLICATE, selector=cls(9))))
        lines.append(f"{cls.__name__} {data.hex()}")
    return lines


def mirrored() -> Iterator[type]:
    """Every dataclass that crosses the wire: the frames and what is in them."""
    found: dict[type, None] = {}
    waiting: list[object] = [m.Call, m.Answer]
    while waiting:
        hint = waiting.pop()
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if hint not in found:
                found[hint] = None
                waiting.extend(get_type_hints(hint).values())
        else:
            waiting.extend(part for part in get_args(hint) if part is not ...)
    return iter(found)


def members(message: type) -> set[str]:
    """Names of a message's fields; the members of a oneof count as the oneof."""
    fields = message.DESCRIPTOR.fields
    return {
        field.containing_oneof.name if field.containing_oneof and not in_synthetic_oneof(field) else field.name
        for field in fields
    }


def in_synthetic_oneof(field: object) -> bool:
    """Whether protoc made the oneof up, for the presence of an `optional` field."""
    return field.containing_oneof.name == f"_{field.name}"


@pytest.mark.parametrize("cls", list(mirrored()), ids=lambda cls: cls.__name__)
def test_message_mirrors_its_dataclass(cls: type) -> None:
    """Each message has the fields of its dataclass, no fewer and no more: neither can change alone."""
    assert members(proto.message_class(cls)) == {field.name for field in dataclasses.fields(cls)}


def test_every_message_is_mirrored_and_nothing_else() -> None:
    """A message of the proto without a dataclass would never be sent; every request and reply is a member."""
    assert set(pb.DESCRIPTOR.message_types_by_name) == {proto.message_class(cls).DESCRIPTOR.name for cls in mirrored()}
    assert len(pb.CallFrame.DESCRIPTOR.oneofs_by_name["request"].fields) == len(get_args(m.Request))
    assert len(pb.AnswerFrame.DESCRIPTOR.oneofs_by_name["reply"].fields) == len(get_args(m.Reply | m.Notice))


def test_nothing_but_64_bit_ints_text_bytes_and_bools() -> None:
    """Scalars of the proto are as wide as those of `codec.py`."""
    kinds = {field.type for message in pb.DESCRIPTOR.message_types_by_name.values() for field in message.fields}
    wire = pb.CallFrame.DESCRIPTOR.fields[0]
    assert kinds == {wire.TYPE_INT64, wire.TYPE_STRING, wire.TYPE_BYTES, wire.TYPE_BOOL, wire.TYPE_MESSAGE}


def test_names_that_modules_repeat_are_the_same() -> None:
    """The process that beats imports neither codec nor protobuf: what it repeats of them equals them."""
    service = pb.DESCRIPTOR.services_by_name["ReferenceServer"]
    assert service.full_name == SERVICE
    assert [f"/{SERVICE}/{method.name}" for method in service.methods] == [METHOD]
    assert FRAME_BYTES_MAX == codec.FRAME_BYTES_MAX


@pytest.mark.parametrize("line", GOLDEN.read_text().splitlines(), ids=lambda line: line.split()[0])
def test_format_is_frozen(line: str) -> None:
    """Field numbers and types are the format: the bytes of yesterday's peer stay readable."""
    assert line in golden_lines()


def test_golden_bytes_cover_every_message() -> None:
    """A message without golden bytes could change its format unseen."""
    assert len(GOLDEN.read_text().splitlines()) == len(golden_lines())


@pytest.mark.slow
@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_round_trip(cls: type) -> None:
    """What is decoded equals what was encoded, in value and in type, for every message class."""

    @settings(max_examples=15, deadline=None)
    @given(instances(cls), CALL_IDS)
    def check(body: object, call_id: int) -> None:
        if cls in get_args(m.Request):
            assert proto.decode_call(proto.encode_call(m.Call(call_id, body))) == m.Call(call_id, body)
        else:
            assert proto.decode_answer(proto.encode_answer(m.Answer(call_id, body))) == m.Answer(call_id, body)

    check()


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.one_of(calls.map(proto.encode_call), answers.map(proto.encode_answer)),
    st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=4),
    st.integers(0, 8),
)
def test_damaged_frames_are_values_or_bad_requests(data: bytes, damage: list[tuple[int, int]], cut: int) -> None:
    """Bytes flipped and cut at will: a value of the declared types, or `BadRequest`; nothing else is raised."""
    broken = bytearray(data[: len(data) - cut] if cut else data)
    for place, value in damage:
        if broken:
            broken[place % len(broken)] = value
    for decode, encode in ((proto.decode_call, proto.encode_call), (proto.decode_answer, proto.encode_answer)):
        try:
            value = decode(bytes(broken))
        except BadRequest:
            continue
        assert decode(encode(value)) == value


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (pb.CallFrame(id=1), "request: none that is known"),
        (pb.CallFrame(id=1, join=pb.Join()), "Join.seat: is missing"),
        (pb.CallFrame(id=1, beat=pb.Beat(session=b"short")), "expected SessionId of 16 bytes"),
        (pb.CallFrame(id=-1, goodbye=pb.Goodbye()), "id is an int from 0"),
        (pb.CallFrame(id=1, wait=pb.Wait(model=pb.ModelKey())), "Wait.selector: none that is known"),
        (pb.CallFrame(id=1, list=pb.List(model=pb.ModelKey(job="x" * (codec.TEXT_BYTES_MAX + 1)))), "a text of more"),
        (pb.CallFrame(id=1, list=pb.List(model=pb.ModelKey(job="é" * (codec.TEXT_BYTES_MAX // 2 + 1)))), "a text of"),
        (pb.CallFrame(id=1, hello=pb.Hello(session=b"s" * 16, token=bytes(codec.BLOB_BYTES_MAX + 1))), "is the most"),
    ],
)
def test_what_is_no_call_is_refused_by_name(frame: pb.CallFrame, why: str) -> None:
    """What protobuf would let pass (missing parts, ids of other lengths, endless texts) is refused with the field."""
    with pytest.raises(BadRequest, match=why):
        proto.decode_call(frame.SerializeToString())


def test_arrays_of_calls_are_short() -> None:
    """What a client repeats is bounded as in `codec.py`; a server's status may be longer."""
    places = pb.Location(parts=[""] * (codec.CALL_ARRAY_MAX + 1))
    wait = pb.Wait(model=pb.ModelKey(), latest=pb.Latest(), location=places)
    with pytest.raises(BadRequest, match=r"Wait.location: Location.parts: 4097 entries; 4096 is the most"):
        proto.decode_call(pb.CallFrame(id=1, wait=wait).SerializeToString())
    many = m.Unpublished(("r",) * (codec.CALL_ARRAY_MAX + 1))
    assert proto.decode_answer(proto.encode_answer(m.Answer(1, many))).reply == many


def test_requests_of_the_future_are_refused_to_their_caller() -> None:
    """A member that we do not know is as good as none, and its caller's id is still there to answer to."""
    future = pb.CallFrame(id=9).SerializeToString() + b"\xfa\x3e\x02\x08\x01"  # field 1007, a message
    with pytest.raises(BadRequest, match="none that is known"):
        proto.decode_call(future)
    assert proto.call_id_of(future) == 9
    assert proto.call_id_of(b"\xff") == 0


def test_sizes_are_bounded_both_ways() -> None:
    """No frame above the limit is made or read."""
    with pytest.raises(BadRequest, match="a frame holds"):
        proto.encode_call(m.Call(1, m.Abort(SEAT, 1, 1, "x" * codec.FRAME_BYTES_MAX)))
    with pytest.raises(BadRequest, match="is the most"):
        proto.decode_call(bytes(codec.FRAME_BYTES_MAX + 1))


@pytest.mark.parametrize(
    "request_",
    [
        m.Unwatch(2**64),
        m.Abort(SEAT, 1, 1, "\ud800"),
        m.Abort(SEAT, "1", 1, ""),
        replace(REPLICATE, selector=7),
        object(),
    ],
    ids=["int", "text", "type", "member", "x"],
)
def test_what_has_no_bytes_is_refused_at_the_sender(request_: object) -> None:
    """An int beyond 64 bits, text that is no Unicode, other types and strangers never reach the wire."""
    with pytest.raises(BadRequest):
        proto.encode_call(m.Call(1, request_))


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(golden_lines()) + "\n")
    sys.exit(0)
