"""The way to a reference server over gRPC: one stream per session, on a connection of its own; `grpcs` is TLS.

It decides how calls queue up for the stream and which beats its heart sends. What secures a stream and what its errors
mean is `grpc_channel.py`'s, when to connect again the session's. It never retries a call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from tensorhub.addresses import is_number
from tensorhub.client.grpc_channel import Stream, Target
from tensorhub.client.grpc_heart import GrpcHeart
from tensorhub.errors import BadRequest, ServerUnavailable
from tensorhub.messages import Answer, Beat, Call, Ok
from tensorhub.ports import Connection, Heart
from tensorhub.transport.route import host_towards
from tensorhub.types import SessionId
from tensorhub.wire.codec import CALL_ID_MAX
from tensorhub.wire.proto import decode_answer, encode_answer, encode_call

#: Calls that wait for the stream to take them; beyond it, senders wait.
OUTBOX_MAX = 64
#: For the stream to take one call: a server that stalls longer has its connection ended.
WRITE_S = 10.0
#: Beats that may go unanswered for so many intervals: a server that is stopped for longer is looked for again.
BEAT_PATIENCE = 3
#: But no less than this: two interpreters answer each other, on hosts whose cores may all be busy.
BEAT_PATIENCE_NS_MIN = 1_000_000_000
#: The id of every beat: no session counts up to it.
BEAT_CALL = CALL_ID_MAX


class GrpcConnection:
    """Frames over one stream. A task of its own writes: a caller that is cancelled must not take the stream with it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        #: Encoded calls, oldest first; the first may be on its way.
        self._outbox: deque[bytes] = deque()
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        #: Why nothing is sent any more, or None.
        self._ended: str | None = None
        self._writer = asyncio.create_task(self._write())

    async def send(self, call: Call) -> None:
        """`BadRequest` when the call has no bytes; then nothing was sent."""
        data = encode_call(call)
        while len(self._outbox) >= OUTBOX_MAX and self._ended is None:
            self._room.clear()
            await self._room.wait()
        if self._ended is not None:
            raise ServerUnavailable(self._ended)
        self._outbox.append(data)
        self._filled.set()

    async def receive(self) -> Answer:
        """Bounded by the heartbeat: a server that does not answer it has its connections closed by the session."""
        try:
            return decode_answer(await self._stream.read())
        except ServerUnavailable as error:
            self._end(str(error))
            raise
        except BadRequest as error:
            self._end(f"what listens there speaks badly: {error}")
            raise ServerUnavailable(f"what listens there speaks badly: {error}") from error

    async def close(self) -> None:
        self._end("the connection is closed")  # what is not sent by now nobody waits for
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)
        await self._stream.close()

    async def _write(self) -> None:
        try:
            while True:
                while self._outbox:
                    async with asyncio.timeout(WRITE_S):
                        await self._stream.write(self._outbox[0])
                    self._outbox.popleft()
                    self._room.set()
                self._filled.clear()
                await self._filled.wait()
        except TimeoutError:
            self._end(f"the server takes no calls: one waited for {WRITE_S:g} s")
        except ServerUnavailable as error:
            self._end(str(error))

    def _end(self, reason: str) -> None:
        if self._ended is None:
            self._ended = reason
            self._stream.end(reason)
            self._room.set()


class GrpcLink:
    """`grpc://HOST:PORT` or `grpcs://HOST:PORT`."""

    def __init__(self, address: str, target: Target) -> None:
        self.address = address
        self._target = target

    async def own_host(self) -> str:
        """As `host_towards`; a name is looked up aside, since a name server may take seconds."""
        if is_number(self._target.address.host):
            return host_towards(self._target.address)
        aside = ThreadPoolExecutor(1, "tensorhub-names")
        try:
            return await asyncio.wrap_future(aside.submit(host_towards, self._target.address))
        finally:
            aside.shutdown(wait=False)

    async def connect(self, timeout_s: float) -> Connection:
        return GrpcConnection(await Stream.open(self._target, timeout_s))

    async def beat(self, session: bytes, interval_ns: int) -> Heart:
        """A process that beats over a stream of its own."""
        request = encode_call(Call(BEAT_CALL, Beat(SessionId(session))))
        expected = encode_answer(Answer(BEAT_CALL, Ok()))
        patience_ns = max(BEAT_PATIENCE * interval_ns, BEAT_PATIENCE_NS_MIN)
        return GrpcHeart(str(self._target), request, expected, interval_ns, patience_ns)


def grpc_link(address: str) -> GrpcLink:
    """The link to `grpc://HOST:PORT` or `grpcs://HOST:PORT`; `BadRequest` for any other address."""
    return GrpcLink(address, Target.parse(address))
