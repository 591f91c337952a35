"""Frames on a byte stream: a big-endian u32 length, then that many bytes.

It decides where one message ends and the next begins, how large one may be and how long its rest may take; it never
looks inside. A broken stream is `BadRequest` (it can only be closed), a slow one `TimeoutError`, a dead one `OSError`.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable

from tensorhub.errors import BadRequest
from tensorhub.wire.codec import FRAME_BYTES_MAX

_LENGTH = struct.Struct(">I")
#: One read from the socket: many small frames come out of one wake-up.
READ_BYTES = 2**16
#: The rest of a frame, once its first byte is here. 16 MiB over a bad network take less.
FRAME_REST_S = 10.0
#: For the peer to take what was written: a reader that stalls longer is cut off.
WRITE_S = 10.0


def frame(payload: bytes) -> bytes:
    """The payload with its length before it."""
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a stream into payloads. Holds at most one frame and one read more than was asked for."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream
        self._buffer = bytearray()

    @property
    def pending(self) -> bool:
        """Whether part of a frame is here."""
        return bool(self._buffer)

    async def next(
        self, most: int = FRAME_BYTES_MAX, *, idle_s: float | None, rest_s: float = FRAME_REST_S
    ) -> bytes | None:
        """The next payload, of at most so many bytes, or None at the stream's proper end.

        `idle_s` bounds the wait for the frame's first byte (None: the caller has another bound), `rest_s` all the rest.
        """
        payload = self._cut(most)
        if payload is not None:
            return payload
        if not self._buffer:
            async with asyncio.timeout(idle_s):
                if not await self._fill():
                    return None
        async with asyncio.timeout(rest_s):
            while (payload := self._cut(most)) is None:
                if not await self._fill():
                    raise BadRequest(f"the stream ended inside a frame, after {len(self._buffer)} bytes of it")
        return payload

    async def _fill(self) -> bool:
        data = await self._stream.read(READ_BYTES)
        self._buffer += data
        return bool(data)

    def _cut(self, most: int) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (nbytes,) = _LENGTH.unpack_from(self._buffer)
        if nbytes > most:
            raise BadRequest(f"a frame of {nbytes} bytes is announced; {most} is the most")
        end = _LENGTH.size + nbytes
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return payload


async def write_frames(stream: asyncio.StreamWriter, payloads: Iterable[bytes], timeout_s: float = WRITE_S) -> None:
    """Hand all payloads over, in order; `TimeoutError` when the peer does not take them in time."""
    stream.write(b"".join([frame(payload) for payload in payloads]))
    if stream.transport.get_write_buffer_size() == 0 and not stream.transport.is_closing():
        return  # the kernel took it all: nothing to wait for, nor to pay a timer for
    async with asyncio.timeout(timeout_s):
        await stream.drain()
