"""Framing finds the edges of messages in any cut of a stream, and bounds size and time."""

from __future__ import annotations

import asyncio
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub.errors import BadRequest
from tensorhub.wire import frames
from tensorhub.wire.codec import FRAME_BYTES_MAX


def stream_of(*parts: bytes, ended: bool = True) -> asyncio.StreamReader:
    """A stream that already received `parts`."""
    stream = asyncio.StreamReader()
    for part in parts:
        stream.feed_data(part)
    if ended:
        stream.feed_eof()
    return stream


@settings(max_examples=20, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 9))
def test_any_cut_of_the_stream_gives_the_same_payloads(payloads: list[bytes], step: int) -> None:
    """Frames come out whole and in order however the stream arrives, then the end is None."""

    async def check() -> None:
        data = b"".join(frames.frame(payload) for payload in payloads)
        stream = asyncio.StreamReader()
        reader = frames.FrameReader(stream)
        found = []
        for start in range(0, len(data), step):
            stream.feed_data(data[start : start + step])
        stream.feed_eof()
        while (payload := await reader.next(idle_s=1.0)) is not None:
            found.append(payload)
        assert found == payloads

    asyncio.run(check())


async def _oversize() -> None:
    reader = frames.FrameReader(stream_of(struct.pack(">I", FRAME_BYTES_MAX + 1), ended=False))
    with pytest.raises(BadRequest, match="is the most"):
        await reader.next(idle_s=1.0)


async def _cut_off() -> None:
    reader = frames.FrameReader(stream_of(frames.frame(b"abcdef")[:-1]))
    with pytest.raises(BadRequest, match="ended inside a frame"):
        await reader.next(idle_s=1.0)


async def _idle() -> None:
    reader = frames.FrameReader(stream_of(ended=False))
    with pytest.raises(TimeoutError):
        await reader.next(idle_s=0.0)


async def _trickle() -> None:
    reader = frames.FrameReader(stream_of(b"\x00", ended=False))
    with pytest.raises(TimeoutError):
        await reader.next(idle_s=None, rest_s=0.0)


@pytest.mark.parametrize("case", [_oversize, _cut_off, _idle, _trickle], ids=lambda case: case.__name__.strip("_"))
def test_bad_streams_end_with_a_reason(case: object) -> None:
    """Oversize is refused before its bytes are held; a cut frame, silence and a trickle each end by name."""
    asyncio.run(case())
