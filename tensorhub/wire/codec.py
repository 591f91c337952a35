"""The bytes of `Call` and `Answer`: msgpack, positional, a small tag where a union needs one.

It decides what a message looks like on the wire, and nothing about what it means. Whatever bytes come in, the outcome
is a value of exactly the declared types or `BadRequest` with the reason; it never raises anything else.

    Call    = [id, [tag, field, field, ...]]          Answer = [id, [tag, field, field, ...]]
    dataclass = [field, ...]      member of a union = [tag, field, ...]      tuple = [...]      None = nil

Order of fields and `TAGS` are the format: frozen, a change of either raises `messages.PROTOCOL`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from operator import attrgetter
from types import NoneType, UnionType
from typing import NewType, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from tensorhub import messages as m
from tensorhub import types as t
from tensorhub.errors import BadRequest

#: A status of 10 000 holdings takes a third of it; more is a mistake or an attack.
FRAME_BYTES_MAX = 16 * 2**20
#: One string: room for a refusal that lists every difference of a large layout.
TEXT_BYTES_MAX = 2**20
#: One opaque value: exposures take 72 bytes, locators a few kilobytes.
BLOB_BYTES_MAX = 2**20
#: Entries of one array: holdings and sessions of the largest cluster in one status.
ARRAY_MAX = 2**17
#: Arrays in what a client sends are short (claims, locators); the parser allocates what a header announces.
CALL_ARRAY_MAX = 2**12
#: Call ids count up from 1 in each session.
CALL_ID_MAX = 2**63 - 1

INT_MIN, INT_MAX = -(2**63), 2**63 - 1

TAGS: dict[type, int] = {
    # requests
    m.Hello: 1,
    m.Beat: 2,
    m.Join: 3,
    m.Publish: 4,
    m.Seal: 5,
    m.Unpublish: 6,
    m.Replicate: 7,
    m.Serve: 8,
    m.Progress: 9,
    m.Reroute: 10,
    m.Done: 11,
    m.Abort: 12,
    m.Wait: 13,
    m.List: 14,
    m.Status: 15,
    m.Watch: 16,
    m.Unwatch: 17,
    m.Leave: 18,
    m.Goodbye: 19,
    # replies
    m.Welcome: 64,
    m.Ok: 65,
    m.Joined: 66,
    m.Unpublished: 67,
    m.Granted: 68,
    m.Held: 69,
    m.Committed: 70,
    m.Found: 71,
    m.Listing: 72,
    m.StatusView: 73,
    m.Event: 74,
    m.Refused: 75,
    m.Announced: 76,
    # notices
    m.Moved: 96,
    m.SourceLost: 97,
    m.TransactionAborted: 98,
    m.Conflicted: 99,
    # selectors
    t.Exactly: 112,
    t.Latest: 113,
    t.AtLeast: 114,
    t.Newest: 115,
}

#: Byte lengths of the random ids and digests. Empty where "none yet" has a meaning.
LENGTHS: dict[object, tuple[int, ...]] = {
    t.SessionId: (t.ID_BYTES,),
    t.Generation: (0, t.ID_BYTES),
    t.Epoch: (0, t.ID_BYTES),
    t.Digest: (0, t.ID_BYTES),
}

Pack = Callable[[object], object]
Unpack = Callable[[object], object]
Frame = TypeVar("Frame", m.Call, m.Answer)


def encode_call(call: m.Call) -> bytes:
    """The bytes of a call, or `BadRequest` when it has none (too large, text that is no Unicode)."""
    return _packed(call.id, call.request)


def encode_answer(answer: m.Answer) -> bytes:
    """The bytes of an answer, or `BadRequest` as for `encode_call`."""
    return _packed(answer.id, answer.reply)


def decode_call(data: bytes) -> m.Call:
    """The call in `data`, or `BadRequest`."""
    call_id, body = _unpacked(data, CALL_ARRAY_MAX)
    try:
        return m.Call(call_id, _REQUEST(body))  # type: ignore[arg-type]  # exactly a Request: built from its type hints
    except BadRequest as error:
        raise _of_another_protocol(body) or error from None


def decode_answer(data: bytes) -> m.Answer:
    """The answer or notice in `data`, or `BadRequest`."""
    call_id, body = _unpacked(data, ARRAY_MAX)
    return m.Answer(call_id, _REPLY(body))  # type: ignore[arg-type]  # exactly a Reply or Notice: built from the hints


def _of_another_protocol(body: object) -> BadRequest | None:
    """Why a Hello that cannot be read is none of ours: its number comes first in every protocol."""
    if type(body) is not tuple or len(body) < 2 or body[0] != TAGS[m.Hello] or type(body[1]) is not int:
        return None
    if body[1] == m.PROTOCOL:
        return None
    return other_protocol(body[1])


def other_protocol(theirs: int) -> BadRequest:
    """What a client of another release is told, whose Hello cannot even be read."""
    return BadRequest(f"this server speaks protocol {m.PROTOCOL}, the client {theirs}; use one release")


def call_id_of(data: bytes) -> int:
    """The id of a frame whose body cannot be read, so that its caller can be told; 0 when not even that is there."""
    unpacker = msgpack.Unpacker(max_buffer_size=FRAME_BYTES_MAX)
    try:
        unpacker.feed(data)
        if unpacker.read_array_header() != 2:
            return 0
        call_id = unpacker.unpack()
    except Exception:  # noqa: BLE001 - any bytes may come in, and msgpack has many ways to say no
        return 0
    return call_id if type(call_id) is int and 0 <= call_id <= CALL_ID_MAX else 0


def _packed(call_id: int, body: object) -> bytes:
    tag = TAGS.get(type(body))
    if tag is None:
        raise BadRequest(f"{type(body).__name__} is no message")
    try:
        data: bytes = msgpack.packb((call_id, (tag, *_PACK[type(body)](body))))
    except (ValueError, OverflowError, TypeError) as error:
        raise BadRequest(f"{type(body).__name__} cannot be put on the wire: {error}") from error
    if len(data) > FRAME_BYTES_MAX:
        raise BadRequest(f"{type(body).__name__} takes {len(data)} bytes; a frame holds {FRAME_BYTES_MAX}")
    return data


def _unpacked(data: bytes, array_max: int) -> tuple[int, object]:
    if len(data) > FRAME_BYTES_MAX:
        raise BadRequest(f"a frame of {len(data)} bytes; {FRAME_BYTES_MAX} is the most")
    try:
        frame = msgpack.unpackb(
            data,
            use_list=False,
            max_str_len=TEXT_BYTES_MAX,
            max_bin_len=BLOB_BYTES_MAX,
            object_hook=_no_map,
            max_array_len=min(array_max, len(data)),  # an item takes a byte at least: no more is made room for
            max_map_len=0,
            max_ext_len=0,
        )
    except Exception as error:  # any bytes may come in, and msgpack has many ways to say no
        raise BadRequest(f"not a msgpack frame: {type(error).__name__} {str(error)[:200]}") from error
    if type(frame) is not tuple or len(frame) != 2:
        raise BadRequest("a frame is an array of an id and a message")
    call_id, body = frame
    if type(call_id) is not int or not 0 <= call_id <= CALL_ID_MAX:
        raise BadRequest("a call's id is an int from 0 to 2**63 - 1")
    return call_id, body


def _no_map(_: object) -> object:
    """Empty maps pass the limit of their length, and take seventy times their byte."""
    raise ValueError("a map")


# ---------------------------------------------------------------- compiled once, at import

_PACK: dict[type, Callable[[object], Iterable[object]]] = {}
_UNPACK: dict[type, Callable[[tuple[object, ...]], object]] = {}


def _same(value: object) -> object:
    return value


def _compile(hint: object) -> tuple[Pack, Unpack]:
    """How a value of type `hint` goes to msgpack's own types and, checked, back. `_same` needs no packing."""
    if isinstance(hint, NewType):
        lengths = LENGTHS.get(hint)
        return (_same, _bytes_of(hint.__name__, lengths)) if lengths else _compile(hint.__supertype__)
    if hint is int:
        return _same, _unpack_int
    if hint is str or hint is bool or hint is bytes:
        return _same, _exactly(hint)
    origin = get_origin(hint)
    if origin is tuple:
        item, dots = get_args(hint)
        assert dots is ..., hint
        return _compile_tuple(*_compile(item))
    if origin is Union or origin is UnionType:
        return _compile_union(get_args(hint))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        _compile_class(hint)
        return _PACK[hint], _positional(hint)
    raise TypeError(f"no bytes are defined for {hint!r}")


def _compile_tuple(pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
    def pack_all(value: object) -> object:
        return [pack(item) for item in value]  # type: ignore[attr-defined]

    def unpack_all(value: object) -> object:
        if type(value) is not tuple:
            raise BadRequest(f"expected an array, not {type(value).__name__}")
        return tuple([unpack(item) for item in value])

    return (_same if pack is _same else pack_all), unpack_all


def _compile_union(members: tuple[object, ...]) -> tuple[Pack, Unpack]:
    kinds = [member for member in members if member is not NoneType]
    if len(kinds) == 1:
        pack, unpack = _compile(kinds[0])
    elif all(kind in (str, int, bool, bytes) for kind in kinds):
        pack, unpack = _same, _one_of({kind: _compile(kind)[1] for kind in kinds})
    else:
        pack, unpack = _compile_tagged(kinds)
    if len(kinds) == len(members):
        return pack, unpack
    return (
        _same if pack is _same else lambda value: None if value is None else pack(value),
        lambda value: None if value is None else unpack(value),
    )


def _compile_tagged(kinds: list[object]) -> tuple[Pack, Unpack]:
    by_tag: dict[object, Callable[[tuple[object, ...]], object]] = {}
    for kind in kinds:
        assert isinstance(kind, type)
        _compile_class(kind)
        by_tag[TAGS[kind]] = _UNPACK[kind]

    def pack(value: object) -> object:
        return (TAGS[type(value)], *_PACK[type(value)](value))

    def unpack(value: object) -> object:
        if type(value) is not tuple or not value or type(value[0]) is not int:
            raise BadRequest("expected an array that starts with a tag")
        fields = by_tag.get(value[0])
        if fields is None:
            raise BadRequest(f"unknown tag {value[0]}")
        return fields(value[1:])

    return pack, unpack


def _compile_class(cls: type) -> None:
    """Fill `_PACK[cls]` and `_UNPACK[cls]`: instance to fields in declared order, and back."""
    if cls in _PACK:
        return
    hints = get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    packs, unpacks = zip(*[_compile(hints[name]) for name in names], strict=True) if names else ((), ())
    _PACK[cls] = _packer(names, packs)
    _UNPACK[cls] = _unpacker(cls, names, unpacks)


def _packer(names: list[str], packs: tuple[Pack, ...]) -> Callable[[object], Iterable[object]]:
    if len(names) > 1 and all(pack is _same for pack in packs):
        return attrgetter(*names)
    steps = list(zip(names, packs, strict=True))

    def pack(value: object) -> Iterable[object]:
        return [step(getattr(value, name)) for name, step in steps]

    return pack


def _unpacker(cls: type, names: list[str], unpacks: tuple[Unpack, ...]) -> Callable[[tuple[object, ...]], object]:
    count = len(names)

    def unpack(values: tuple[object, ...]) -> object:
        if len(values) != count:
            raise BadRequest(f"{cls.__name__} has {count} fields, not {len(values)}")
        try:
            return cls(*[step(value) for step, value in zip(unpacks, values, strict=True)])
        except BadRequest:
            raise _naming(cls, names, unpacks, values) from None

    return unpack


def _naming(cls: type, names: list[str], unpacks: tuple[Unpack, ...], values: tuple[object, ...]) -> BadRequest:
    """The error of the first field that does not unpack, with the field's name: only paid for when one fails."""
    for name, step, value in zip(names, unpacks, values, strict=True):
        try:
            step(value)
        except BadRequest as error:
            return BadRequest(f"{cls.__name__}.{name}: {error.message}")
    return BadRequest(f"{cls.__name__} is malformed")


def _positional(cls: type) -> Unpack:
    fields = _UNPACK[cls]

    def unpack(value: object) -> object:
        if type(value) is not tuple:
            raise BadRequest(f"expected {cls.__name__} as an array, not {type(value).__name__}")
        return fields(value)

    return unpack


def _exactly(kind: type) -> Unpack:
    def unpack(value: object) -> object:
        if type(value) is not kind:
            raise BadRequest(f"expected {kind.__name__}, not {type(value).__name__}")
        return value

    return unpack


def _unpack_int(value: object) -> object:
    if type(value) is not int:
        raise BadRequest(f"expected int, not {type(value).__name__}")
    if not INT_MIN <= value <= INT_MAX:
        raise BadRequest(f"{value} takes more than 64 bits")
    return value


def _one_of(unpacks: dict[object, Unpack]) -> Unpack:
    def unpack(value: object) -> object:
        step = unpacks.get(type(value))
        if step is None:
            raise BadRequest(f"did not expect {type(value).__name__}")
        return step(value)

    return unpack


def _bytes_of(name: str, lengths: tuple[int, ...]) -> Unpack:
    def unpack(value: object) -> object:
        if type(value) is not bytes or len(value) not in lengths:
            raise BadRequest(f"expected {name} of {' or '.join(map(str, lengths))} bytes")
        return value

    return unpack


_REQUEST = _compile(m.Request)[1]
_REPLY = _compile(m.Reply | m.Notice)[1]
