"""A client of another release learns so, by both numbers, even where its Hello cannot be read here."""

from __future__ import annotations

import msgpack
import pytest

from tensorhub import messages as m
from tensorhub.errors import BadRequest
from tensorhub.wire import codec, proto
from tensorhub.wire import reference_pb2 as pb

LATER = m.PROTOCOL + 1
BOTH = f"speaks protocol {m.PROTOCOL}, the client {LATER}"


def test_a_hello_of_other_fields_names_both_protocols() -> None:
    """The number comes first in every protocol; what follows it may be anything."""
    with pytest.raises(BadRequest, match=BOTH):
        codec.decode_call(msgpack.packb((1, (codec.TAGS[m.Hello], LATER, b"s" * 32, "what", "else"))))
    with pytest.raises(BadRequest, match=BOTH):
        proto.decode_call(pb.CallFrame(id=1, hello=pb.Hello(protocol=LATER, session=b"s" * 32)).SerializeToString())


def test_a_hello_of_our_protocol_names_what_is_wrong_with_it() -> None:
    """A Hello that says our number and is malformed is refused by its field."""
    with pytest.raises(BadRequest, match=r"Hello has 6 fields, not 3"):
        codec.decode_call(msgpack.packb((1, (codec.TAGS[m.Hello], m.PROTOCOL, b"s" * 16, b""))))
    with pytest.raises(BadRequest, match=r"Hello.session"):
        proto.decode_call(pb.CallFrame(id=1, hello=pb.Hello(protocol=m.PROTOCOL)).SerializeToString())
