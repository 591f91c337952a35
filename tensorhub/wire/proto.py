"""The same messages as protobuf frames: the bytes that travel over gRPC, as `codec.py` gives those of plain sockets.

It decides how a value of `messages.py` becomes a message of `reference.proto` and, checked, back; nothing about what it
means. Whatever bytes come in, the outcome is a value of exactly the declared types or `BadRequest` with the reason.

One converter for all: it is compiled, once per class, from the type hints of the dataclass and the descriptor of the
protobuf message of the same name. A union is the oneof named as its field, with the member of the value's own class.
As protobuf has it, an absent number is 0, an absent text empty, and fields that we do not know are passed over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, NewType, Union, cast, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, EncodeError, Message

from tensorhub import messages as m
from tensorhub.errors import BadRequest
from tensorhub.wire import reference_pb2 as pb
from tensorhub.wire.codec import (
    ARRAY_MAX,
    BLOB_BYTES_MAX,
    CALL_ARRAY_MAX,
    CALL_ID_MAX,
    FRAME_BYTES_MAX,
    LENGTHS,
    TEXT_BYTES_MAX,
    other_protocol,
)

#: Puts a value into the message that has the field.
Fill = Callable[[Message, Any], None]
#: The checked value of the field of a message.
Read = Callable[[Message], object]

#: Names that differ: a frame of protobuf is a message like any other.
_NAMES = {m.Call: "CallFrame", m.Answer: "AnswerFrame"}
_SCALARS = {
    int: FieldDescriptor.TYPE_INT64,
    str: FieldDescriptor.TYPE_STRING,
    bool: FieldDescriptor.TYPE_BOOL,
    bytes: FieldDescriptor.TYPE_BYTES,
}


def encode_call(call: m.Call) -> bytes:
    """The bytes of a call, or `BadRequest` when it has none (too large, text that is no Unicode)."""
    return _encoded(pb.CallFrame(), _CALL, call, call.request)


def encode_answer(answer: m.Answer) -> bytes:
    """The bytes of an answer, or `BadRequest` as for `encode_call`."""
    return _encoded(pb.AnswerFrame(), _ANSWER, answer, answer.reply)


def decode_call(data: bytes) -> m.Call:
    """The call in `data`, or `BadRequest`."""
    frame = pb.CallFrame()
    try:
        return cast(m.Call, _decoded(data, frame, _CALL))
    except BadRequest as error:
        if frame.WhichOneof("request") == "hello" and frame.hello.protocol not in (0, m.PROTOCOL):
            raise other_protocol(frame.hello.protocol) from error
        raise


def decode_answer(data: bytes) -> m.Answer:
    """The answer or notice in `data`, or `BadRequest`."""
    return cast(m.Answer, _decoded(data, pb.AnswerFrame(), _ANSWER))


def call_id_of(data: bytes) -> int:
    """The id of a call whose body cannot be used, so that its caller can be told; 0 when not even that is there."""
    frame = pb.CallFrame()
    try:
        frame.ParseFromString(data)
    except DecodeError:
        return 0
    return frame.id if 0 <= frame.id <= CALL_ID_MAX else 0


def message_class(cls: type) -> type[Message]:
    """The protobuf message that mirrors a dataclass."""
    return cast(type[Message], getattr(pb, _NAMES.get(cls, cls.__name__)))


def _encoded(frame: Message, converter: _Converter, value: object, body: object) -> bytes:
    try:
        converter.fill(frame, value)
        data = frame.SerializeToString(deterministic=True)
    except (ValueError, TypeError, AttributeError, EncodeError) as error:
        raise BadRequest(f"{type(body).__name__} cannot be put on the wire: {error}") from error
    if len(data) > FRAME_BYTES_MAX:
        raise BadRequest(f"{type(body).__name__} takes {len(data)} bytes; a frame holds {FRAME_BYTES_MAX}")
    return data


def _decoded(data: bytes, frame: Message, converter: _Converter) -> object:
    if len(data) > FRAME_BYTES_MAX:
        raise BadRequest(f"a frame of {len(data)} bytes; {FRAME_BYTES_MAX} is the most")
    try:
        frame.ParseFromString(data)
    except DecodeError as error:
        raise BadRequest(f"not a frame of {frame.DESCRIPTOR.full_name}: {error}") from error
    value = converter.read(frame)
    if not 0 <= value.id <= CALL_ID_MAX:  # type: ignore[attr-defined]  # both kinds of frame have an id
        raise BadRequest("a call's id is an int from 0 to 2**63 - 1")
    return value


# ---------------------------------------------------------------- compiled once, at import


class _Converter:
    """Between one dataclass and its message: a step per field, in declared order. `array_max` bounds what is repeated
    in it, as it does in `codec.py`: what clients send is short, a status is not."""

    def __init__(self, cls: type, array_max: int) -> None:
        self._cls = cls
        self._array_max = array_max
        descriptor = cast(Descriptor, message_class(cls).DESCRIPTOR)
        hints = get_type_hints(cls)
        self._names = [field.name for field in dataclasses.fields(cls)]
        self._steps = [self._compile(hints[name], name, descriptor) for name in self._names]

    def fill(self, message: Message, value: object) -> None:
        if type(value) is not self._cls:
            raise TypeError(f"expected {self._cls.__name__}, not {type(value).__name__}")
        for name, (fill, _) in zip(self._names, self._steps, strict=True):
            fill(message, getattr(value, name))

    def read(self, message: Message) -> object:
        try:
            return self._cls(*[read(message) for _, read in self._steps])
        except BadRequest:
            raise self._naming(message) from None

    def _naming(self, message: Message) -> BadRequest:
        """The error of the first field that does not convert, with its name: only paid for when one fails."""
        for name, (_, read) in zip(self._names, self._steps, strict=True):
            try:
                read(message)
            except BadRequest as error:
                return BadRequest(f"{self._cls.__name__}.{name}: {error.message}")
        return BadRequest(f"{self._cls.__name__} is malformed")

    def _compile(self, hint: object, name: str, descriptor: Descriptor) -> tuple[Fill, Read]:
        origin = get_origin(hint)
        if origin is Union or origin is UnionType:
            kinds = [kind for kind in get_args(hint) if kind is not NoneType]
            optional = len(kinds) < len(get_args(hint))
            if len(kinds) > 1:
                return self._compile_oneof(kinds, name, descriptor, optional=optional)
            fill, read = self._compile(kinds[0], name, descriptor)
            return _unless_none(fill), _where_present(name, read)
        field = descriptor.fields_by_name[name]
        if origin is tuple:
            item, dots = get_args(hint)
            assert dots is ..., hint
            return self._compile_repeated(item, field)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return _message_step(field, _converter(hint, self._array_max))
        return _scalar_step(hint, field)

    def _compile_repeated(self, item: object, field: FieldDescriptor) -> tuple[Fill, Read]:
        name, array_max = field.name, self._array_max
        if isinstance(item, type) and dataclasses.is_dataclass(item):
            assert _fits(field, item), field.full_name
            inner = _converter(item, array_max)
            read_item: Callable[[Any], object] = inner.read

            def fill(message: Message, values: Any) -> None:
                repeated = getattr(message, name)
                for value in values:
                    inner.fill(repeated.add(), value)
        else:
            read_item = _check_of(item, field)

            def fill(message: Message, values: Any) -> None:
                getattr(message, name).extend(values)

        def read(message: Message) -> object:
            repeated = getattr(message, name)
            if len(repeated) > array_max:
                raise BadRequest(f"{len(repeated)} entries; {array_max} is the most")
            return tuple([read_item(value) for value in repeated])

        return fill, read

    def _compile_oneof(
        self, kinds: list[Any], name: str, descriptor: Descriptor, *, optional: bool
    ) -> tuple[Fill, Read]:
        members = descriptor.oneofs_by_name[name].fields
        steps: dict[type, tuple[Fill, Read]] = {}
        reads: dict[str, Read] = {}
        for kind in kinds:
            field = next(member for member in members if _fits(member, kind))
            if kind in _SCALARS:
                steps[kind] = _scalar_step(kind, field)
            else:
                steps[kind] = _message_step(field, _converter(kind, self._array_max))
            reads[field.name] = steps[kind][1]

        def fill(message: Message, value: Any) -> None:
            if value is None and optional:
                return
            step = steps.get(type(value))
            if step is None:
                raise TypeError(f"{type(value).__name__} is no {name}")
            step[0](message, value)

        def read(message: Message) -> object:
            chosen = message.WhichOneof(name)
            if chosen is None:
                if optional:
                    return None
                raise BadRequest("none that is known here")
            return reads[chosen](message)

        return fill, read


def _fits(field: FieldDescriptor, kind: type) -> bool:
    """Whether a member of a oneof is the one for values of `kind`."""
    if kind in _SCALARS:
        return bool(field.type == _SCALARS[kind])
    return field.message_type is not None and field.message_type.name == message_class(kind).DESCRIPTOR.name


def _message_step(field: FieldDescriptor, inner: _Converter) -> tuple[Fill, Read]:
    name = field.name

    def fill(message: Message, value: Any) -> None:
        part = getattr(message, name)
        part.SetInParent()  # an empty message is there, too
        inner.fill(part, value)

    def read(message: Message) -> object:
        if not message.HasField(name):
            raise BadRequest("is missing")
        return inner.read(getattr(message, name))

    return fill, read


def _scalar_step(hint: object, field: FieldDescriptor) -> tuple[Fill, Read]:
    name = field.name
    check = _check_of(hint, field)

    def fill(message: Message, value: Any) -> None:
        setattr(message, name, value)

    def read(message: Message) -> object:
        return check(getattr(message, name))

    return fill, read


def _check_of(hint: object, field: FieldDescriptor) -> Callable[[Any], object]:
    """What a parsed scalar must still show: protobuf has seen to its type, its range and its Unicode."""
    lengths: tuple[int, ...] | None = None
    label = field.name
    while isinstance(hint, NewType):
        lengths, label = lengths or LENGTHS.get(hint), hint.__name__
        hint = hint.__supertype__
    assert field.type == _SCALARS[cast(type, hint)], field.full_name
    if lengths:
        return _length_in(label, lengths)
    if hint is str:
        return _text
    return _blob if hint is bytes else _as_it_is


def _length_in(label: str, lengths: tuple[int, ...]) -> Callable[[Any], object]:
    def check(value: bytes) -> object:
        if len(value) not in lengths:
            raise BadRequest(f"expected {label} of {' or '.join(map(str, lengths))} bytes")
        return value

    return check


def _text(value: str) -> object:
    if len(value) > TEXT_BYTES_MAX or (len(value) > TEXT_BYTES_MAX // 4 and len(value.encode()) > TEXT_BYTES_MAX):
        raise BadRequest(f"a text of more than {TEXT_BYTES_MAX} bytes")
    return value


def _blob(value: bytes) -> object:
    if len(value) > BLOB_BYTES_MAX:
        raise BadRequest(f"{len(value)} bytes; {BLOB_BYTES_MAX} is the most")
    return value


def _as_it_is(value: Any) -> object:
    return cast(object, value)


def _unless_none(fill: Fill) -> Fill:
    return lambda message, value: None if value is None else fill(message, value)


def _where_present(name: str, read: Read) -> Read:
    return lambda message: read(message) if message.HasField(name) else None


_compiled: dict[tuple[type, int], _Converter] = {}


def _converter(cls: type, array_max: int) -> _Converter:
    found = _compiled.get((cls, array_max))
    if found is None:
        found = _compiled[cls, array_max] = _Converter(cls, array_max)
    return found


_CALL, _ANSWER = _converter(m.Call, CALL_ARRAY_MAX), _converter(m.Answer, ARRAY_MAX)
