"""Every decoder of bytes that others send, each as a target: valid inputs to start from, and what may come of any.

A target passes when its input is decoded to a value that encodes again, or refused by the error that its decoder
documents. Anything else that is raised, and memory beyond a small multiple of the input, is a finding.
"""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import numpy as np
import xxhash

from tensorhub import messages as m
from tensorhub.addresses import Address
from tensorhub.errors import BadRequest, EngineUnavailable, SourceFailed, TensorHubError, VersionOrder
from tensorhub.pipeline.exposure import HEADER_BYTES, Exposure, Header
from tensorhub.pipeline.manifest import Manifest
from tensorhub.pipeline.memory_map import MemoryMap
from tensorhub.transport.cuda_exports import Locator
from tensorhub.transport.endpoints import Endpoint
from tensorhub.transport.memory import MemoryEngine
from tensorhub.transport.mooncake_read import Place
from tensorhub.transport.processes import Identity
from tensorhub.types import Digest, Generation, Location, SessionId, parse_selector
from tensorhub.wire import codec, proto
from tensorhub.wire.frames import FrameReader, frame
from tensorhub.wire.local_place import check_local_name
from tensorhub.wire.token import TOKEN_BYTES_MAX, read_token
from tests.fuzz import tcp
from tests.fuzz.senseless import prove_unharmed, torment
from tests.unit.wire.examples import example

#: A value may take so many times the bytes it came in: objects of Python for single bytes.
TIMES_MAX = 100
#: And so much whatever came in: what a parser makes room for where lists are announced within lists, a thousand deep.
ROOM_BYTES_MAX = 100 << 20


class Found(AssertionError):
    """A target did what it must not."""


@dataclass(frozen=True)
class Target:
    """`check` takes any bytes; `valid` makes inputs that are decoded."""

    check: Callable[[bytes], None]
    valid: Callable[[], list[bytes]]
    #: Of what a decoder makes of an input, in bytes beside `TIMES_MAX`; None where memory is measured otherwise.
    room_bytes: int | None = 1 << 20
    #: What must hold after many inputs.
    finish: Callable[[], None] = lambda: None

    def run(self, data: bytes) -> None:
        """Check one input, its memory included."""
        if self.room_bytes is None:
            self.check(data)
            return
        tracemalloc.start()
        try:
            self.check(data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        if peak > TIMES_MAX * len(data) + self.room_bytes:
            raise Found(f"{len(data)} bytes took {peak} bytes of memory")


def _decoder(
    decode: Callable[[bytes], object], encode: Callable[[object], bytes], refusal: type[TensorHubError]
) -> Callable[[bytes], None]:
    def check(data: bytes) -> None:
        try:
            value = decode(data)
        except refusal:
            return
        if decode(encode(value)) != value:
            raise Found(f"{value!r} does not come back from its own bytes")

    return check


# ---------------------------------------------------------------- wire

_REQUESTS = [example(cls) for cls in get_args(m.Request)]
_REPLIES = [example(cls) for cls in (*get_args(m.Reply), *get_args(m.Notice))]


def _check_frames(data: bytes) -> None:
    async def read() -> None:
        stream = asyncio.StreamReader()
        stream.feed_data(data)
        stream.feed_eof()
        reader, cut = FrameReader(stream), b""
        try:
            while (payload := await reader.next(idle_s=None)) is not None:
                cut += frame(payload)
        except BadRequest:
            pass
        if not data.startswith(cut):
            raise Found("what was cut out is not what came in")

    asyncio.run(read())


def _codec_target(module: object, of_calls: bool) -> Target:
    if of_calls:
        check = _decoder(module.decode_call, module.encode_call, BadRequest)  # type: ignore[attr-defined]
        valid = [module.encode_call(m.Call(7, request)) for request in _REQUESTS]  # type: ignore[attr-defined]
    else:
        check = _decoder(module.decode_answer, module.encode_answer, BadRequest)  # type: ignore[attr-defined]
        valid = [module.encode_answer(m.Answer(7, reply)) for reply in _REPLIES]  # type: ignore[attr-defined]

    def check_all(data: bytes) -> None:
        check(data)
        if not 0 <= module.call_id_of(data) <= codec.CALL_ID_MAX:  # type: ignore[attr-defined]
            raise Found("an id that no call has")

    return Target(check_all, lambda: valid, ROOM_BYTES_MAX)


def _check_token(data: bytes) -> None:
    """The file is in memory, and has a path."""
    fd = os.memfd_create("token")
    try:
        os.write(fd, data)
        token = read_token(f"/proc/self/fd/{fd}")
    except BadRequest:
        return
    finally:
        os.close(fd)
    if token != data.strip() or not 0 < len(token) <= TOKEN_BYTES_MAX:
        raise Found(f"a token of {len(token)} bytes")


def _check_texts(data: bytes) -> None:
    """What users write, as any text: addresses, names, places, selectors."""
    text = data.decode("utf-8", "surrogateescape")
    for parse in (Address.parse, Location.parse, check_local_name, parse_selector):
        try:
            value = parse(text)
            if not isinstance(value, str) and parse(str(value)) != value and parse is not parse_selector:
                raise Found(f"{value!r} does not come back from its own text")
        except (BadRequest, VersionOrder):
            continue


# ---------------------------------------------------------------- what a source shows


def _manifest() -> Manifest:
    return Manifest.build(
        ["w.b", "w.a", "tiny", "part", "zero", "scalar"],
        ["float32", "bfloat16", "uint8", "float32", "float32", "int64"],
        [(200, 600), (5000,), (5,), (600,), (0, 3), ()],
        [480_000, 10_000, 5, 2400, 0, 8],
        [-1, -1, -1, 0, -1, -1],
        [0, 0, 0, 2400, 0, 0],
    )


def _decode_manifest(data: bytes) -> bytes:
    return Manifest.decode(data).encode()


#: What the map of a target tiles.
_STREAM_BYTES = 10_000


def _decode_map(data: bytes) -> bytes:
    return MemoryMap.decode(data, _STREAM_BYTES).encode()


def _maps() -> list[bytes]:
    whole = MemoryMap.tiled([4096], [_STREAM_BYTES])
    pieces = MemoryMap.tiled(np.arange(1, 101) * 4096, np.full(100, _STREAM_BYTES // 100))
    return [whole.encode(), pieces.encode()]


_CHECKED_BYTES = 88


def _check_header(data: bytes) -> None:
    """As it came in, and with a checksum that is right: most edits are of what it covers."""
    check = _decoder(_decode_header, _encode_header, SourceFailed)
    check(data)
    body = data[:_CHECKED_BYTES]
    check(body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") + data[_CHECKED_BYTES + 8 :])


def _decode_header(data: bytes) -> Header | None:
    return Header.unpack(data)


def _encode_header(header: object) -> bytes:
    """None, for one that was caught half-written, has bytes, too: they are no header."""
    return header.pack() if isinstance(header, Header) else b"\xff" * HEADER_BYTES


_HEADER = Header(SessionId(b"i" * 16), Generation(b"g" * 16), 1000, 999, Digest(b"m" * 16), True)
_EXPOSURE = Exposure(0x7F0000001000, 1000, 0x7F0000002000, 300, 0x7F0000003000, 200, 0xDEADBEEF)


# ---------------------------------------------------------------- locators


def _locator(cls: type) -> Callable[[bytes], None]:
    return _decoder(cls.unpack, lambda value: value.pack(), EngineUnavailable)  # type: ignore[attr-defined]


def _check_memory_locator(data: bytes) -> None:
    """`reaches` answers by a reason; nothing in a locator makes it raise."""
    if not isinstance(MemoryEngine().reaches(data), str | None):
        raise Found("neither a reason nor none")


_IDENTITY = Identity("boot", 4026531836, 77, 12345, 1000)
_ENDPOINT = Endpoint("10.0.0.7", 5000, bytes(range(16)), "boot", 4026531840)
_IPV6 = Endpoint("fe80::1", 5000, bytes(range(16)), "boot", 4026531840)
_PLACE = Place("boot", Address("10.0.0.7", 12345), "tcp", bytes(16), 0x7F0000001000)
_CUDA = Locator(_IDENTITY.pack(), bytes(16), 0x7F0000001000, 800, 7)

# ---------------------------------------------------------------- all


def _check_machine(data: bytes) -> None:
    prove_unharmed(torment(data))


TARGETS: dict[str, Target] = {
    "frames": Target(_check_frames, lambda: [frame(b""), frame(b"one") + frame(b"two"), frame(bytes(70_000))]),
    "msgpack-call": _codec_target(codec, of_calls=True),
    "msgpack-answer": _codec_target(codec, of_calls=False),
    "protobuf-call": _codec_target(proto, of_calls=True),
    "protobuf-answer": _codec_target(proto, of_calls=False),
    "token": Target(_check_token, lambda: [b"secret\n", b"x" * TOKEN_BYTES_MAX]),
    "texts": Target(
        _check_texts,
        lambda: [b"[::1]:50051", b"host:1", b"dc/rack/host", b"latest-3", b"7", b"name", b"fe80::1%eth0", b"9" * 5000],
    ),
    "header": Target(_check_header, lambda: [_HEADER.pack()]),
    "exposure": Target(
        _decoder(Exposure.unpack, lambda value: value.pack(), SourceFailed),  # type: ignore[attr-defined]
        lambda: [_EXPOSURE.pack()],
    ),
    "manifest": Target(
        _decoder(_decode_manifest, bytes, SourceFailed),
        lambda: [_manifest().encode(), Manifest.build([], [], [], []).encode()],
        ROOM_BYTES_MAX,
    ),
    "memory-map": Target(_decoder(_decode_map, bytes, SourceFailed), _maps),
    "locator-local": Target(_locator(Identity), lambda: [_IDENTITY.pack()]),
    "locator-tcp": Target(_locator(Endpoint), lambda: [_ENDPOINT.pack(), _IPV6.pack()]),
    "locator-mooncake": Target(_locator(Place), lambda: [_PLACE.pack()]),
    "locator-cuda": Target(_locator(Locator), lambda: [_CUDA.pack()]),
    "locator-memory": Target(_check_memory_locator, lambda: [MemoryEngine().locate()]),
    "tcp": Target(tcp.check, tcp.valid, None, tcp.finish),
    "machine": Target(_check_machine, lambda: [bytes(range(256)) * 4], None),
}
