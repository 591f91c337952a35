"""The frozen bytes with which a holder shows a shard."""

from __future__ import annotations

from dataclasses import replace

import pytest
import xxhash

from tensorhub.errors import SourceFailed
from tensorhub.pipeline.exposure import HEADER_BYTES, Exposure, Header, block_bytes
from tensorhub.types import Digest, Generation, SessionId

HEADER = Header(SessionId(b"i" * 16), Generation(b"g" * 16), 1000, 999, Digest(b"m" * 16), True)
EXPOSURE = Exposure(0x7F0000001000, 1000, 0x7F0000002000, 300, 0x7F0000003000, 200, 0xDEADBEEF)


def test_the_progress_block_is_frozen() -> None:
    """Golden bytes: version 1 of the header, which every reader of every release checks."""
    packed = HEADER.pack()
    assert packed.hex() == (
        "5448424c4f434b310100000001000000"
        + "69" * 16
        + "67" * 16
        + "e803000000000000e703000000000000"
        + "6d" * 16
        + "0000000000000000c78cef976583c5e4"
        + "00" * 32
    )
    assert Header.unpack(packed) == HEADER
    assert len(packed) == HEADER_BYTES
    assert block_bytes(1000) == 128 + 8000


def test_a_torn_header_does_not_pass() -> None:
    """Any half-written header is read as None, never as another header."""
    old, new = HEADER.pack(), Header(HEADER.incarnation, Generation(b"h" * 16), 1000, 5, HEADER.manifest, True).pack()
    for cut in range(8, 96, 8):
        torn = new[:cut] + old[cut:]
        assert torn in (old, new) or Header.unpack(torn) is None


def test_what_a_header_says_comes_back() -> None:
    """With digests or without, complete, and whatever the beat; a watermark beyond its chunks is no header."""
    for header in (
        replace(HEADER, digests=False, beats=7),
        replace(HEADER, watermark=1000),
        replace(HEADER, chunks=0, watermark=0),
    ):
        again = Header.unpack(header.pack())
        assert again == header
        assert again.beats == header.beats
    assert replace(HEADER, beats=7) == HEADER, "a beat says nothing about what is held"
    assert Header.unpack(replace(HEADER, watermark=1001).pack()) is None


def test_other_formats_are_told_from_torn_headers() -> None:
    """A header of another length, magic or format is refused by name: no look will ever show another one."""
    packed = HEADER.pack()
    for length in (HEADER_BYTES - 1, HEADER_BYTES + 1):
        with pytest.raises(SourceFailed, match=f"header of {length} bytes"):
            Header.unpack(packed.ljust(length, b"\0")[:length])
    for strange in (b"THBLOCK2" + packed[8:88], packed[:8] + b"\2" + packed[9:88]):
        checked = strange + xxhash.xxh3_64_intdigest(strange).to_bytes(8, "little")
        with pytest.raises(SourceFailed, match="this reader knows 1"):
            Header.unpack(checked.ljust(HEADER_BYTES, b"\0"))


def test_a_malformed_exposure_is_refused() -> None:
    """Neither shorter nor longer, nor of another format."""
    packed = EXPOSURE.pack()
    for strange in (packed[:-1], packed + b"\0", b"THEXPO2\0" + packed[8:]):
        with pytest.raises(SourceFailed, match=f"malformed .{len(strange)} bytes"):
            Exposure.unpack(strange)


def test_the_exposure_is_frozen() -> None:
    """Golden bytes: version 1 of what a reference carries."""
    packed = EXPOSURE.pack()
    assert packed.hex() == (
        "54484558504f31000010000000"
        "7f0000e8030000000000000020000000"
        "7f00002c0100000000000000300000007f0000"
        "c800000000000000efbeadde000000000000000000000000"
    )
    assert Exposure.unpack(packed) == EXPOSURE
