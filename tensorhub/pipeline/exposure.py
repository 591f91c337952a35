"""The bytes with which a holder shows a shard: the progress block, and the exposure that says where it lies.

Pure packing and unpacking; frozen format, version 1. All integers are little-endian.

The exposure travels in a `Reference`, opaque to the server (72 bytes):

    0        8        16       24       32       40       48       56       64       72
    +--------+--------+--------+--------+--------+--------+--------+--------+--------+
    | magic  | block  | chunks | mani-  | mani-  | map    | map    | map    | flags  |
    | THEXPO1| address|        | fest at| fest n | at     | nbytes | xxh3-64|        |
    +--------+--------+--------+--------+--------+--------+--------+--------+--------+

The progress block is registered memory of the holder, read one-sided by its readers: a header of 128 bytes, then one
xxh3-64 digest (8 bytes) per chunk, in stream order.

    0         8       12      16            32            48      56         64          80        88        96   128
    +---------+-------+-------+-------------+-------------+-------+----------+-----------+---------+---------+----+
    | THBLOCK1| format| flags | incarnation | generation  | chunks| watermark| manifest  | beats   | check   | 0  |
    +---------+-------+-------+-------------+-------------+-------+----------+-----------+---------+---------+----+

`watermark` counts the chunks of the prefix that may be read: digested ones for a publisher, verified ones for a reader.
`beats` changes a few times a second while a reader waits for its own source: so who waits can be told from who stands
still. `check` is the xxh3-64 of bytes 0 to 88: a header caught half-written does not pass, and is read again. Digests
below the watermark are written before the header that covers them. A generation of zeros: nothing to read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import xxhash

from tensorhub.errors import SourceFailed
from tensorhub.types import Digest, Generation, SessionId

FORMAT = 1
BLOCK_MAGIC = b"THBLOCK1"
EXPOSURE_MAGIC = b"THEXPO1\0"
HEADER_BYTES = 128
DIGEST_BYTES = 8
#: Header flag: the digests are valid. Absent for versions published with `digest="off"`.
FLAG_DIGESTS = 1

_HEADER = struct.Struct("<8sII16s16sQQ16sQ")
_CHECK = struct.Struct("<Q")
_EXPOSURE = struct.Struct("<8sQQQQQQQQ")


@dataclass(frozen=True, slots=True)
class Header:
    """A progress block's header, checked."""

    incarnation: SessionId
    generation: Generation
    chunks: int
    watermark: int
    manifest: Digest
    digests: bool
    #: Says that the holder lives, nothing about what it holds.
    beats: int = field(default=0, compare=False)

    def pack(self) -> bytes:
        body = _HEADER.pack(
            BLOCK_MAGIC,
            FORMAT,
            FLAG_DIGESTS if self.digests else 0,
            self.incarnation,
            self.generation,
            self.chunks,
            self.watermark,
            self.manifest,
            self.beats,
        )
        return (body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Header | None:
        """The header, or None when it was caught half-written. `SourceFailed` for another format."""
        if len(data) != HEADER_BYTES:
            raise SourceFailed(f"the source's progress block has a header of {len(data)} bytes, not {HEADER_BYTES}")
        body = data[: _HEADER.size]
        magic, version, flags, incarnation, generation, chunks, watermark, manifest, beats = _HEADER.unpack(body)
        if xxhash.xxh3_64_intdigest(body) != _CHECK.unpack_from(data, _HEADER.size)[0]:
            return None
        if magic != BLOCK_MAGIC or version != FORMAT:
            raise SourceFailed(
                f"the source's progress block has format {magic!r} {version}, this reader knows {FORMAT}"
            )
        if watermark > chunks:
            return None
        return cls(
            SessionId(incarnation),
            Generation(generation),
            chunks,
            watermark,
            Digest(manifest),
            bool(flags & FLAG_DIGESTS),
            beats,
        )


def block_bytes(chunks: int) -> int:
    """Size of a progress block."""
    return HEADER_BYTES + DIGEST_BYTES * chunks


@dataclass(frozen=True, slots=True)
class Exposure:
    """Addresses, in the holder, of what a reader needs before the first byte of weights."""

    block: int
    chunks: int
    manifest: int
    manifest_bytes: int
    map: int
    map_bytes: int
    #: xxh3-64 of the encoded memory map.
    map_check: int

    def pack(self) -> bytes:
        return _EXPOSURE.pack(
            EXPOSURE_MAGIC,
            self.block,
            self.chunks,
            self.manifest,
            self.manifest_bytes,
            self.map,
            self.map_bytes,
            self.map_check,
            0,
        )

    @classmethod
    def unpack(cls, data: bytes) -> Exposure:
        if len(data) != _EXPOSURE.size or data[:8] != EXPOSURE_MAGIC:
            raise SourceFailed(f"the reference's exposure is malformed ({len(data)} bytes)")
        _, block, chunks, manifest, manifest_bytes, map_at, map_bytes, map_check, _ = _EXPOSURE.unpack(data)
        return cls(block, chunks, manifest, manifest_bytes, map_at, map_bytes, map_check)
