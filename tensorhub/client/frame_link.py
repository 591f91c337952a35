"""Frames over a connected stream socket, whatever its family, and a heartbeat over another; and the link over TCP.

It decides how messages cross a socket and how its failures are told, and how a server at a known address is dialled.
It never looks for a server, starts one or tries again: that is the link's that names it.
"""

from __future__ import annotations

import asyncio
import socket

from tensorhub.addresses import Address
from tensorhub.errors import BadRequest, ServerUnavailable
from tensorhub.messages import Answer, Beat, Call, Ok
from tensorhub.ports import Connection, Heart
from tensorhub.transport.route import host_towards
from tensorhub.types import SessionId
from tensorhub.wire.codec import CALL_ID_MAX, decode_answer, encode_answer, encode_call
from tensorhub.wire.frames import FrameReader, frame, write_frames
from tensorhub.wire.sockets import tcp_socket, tune

SCHEME = "frames://"
#: Beats that may go unanswered for so many intervals: a server that is stopped for longer is looked for again.
BEAT_PATIENCE = 3
#: The id of every beat: no session counts up to it.
BEAT_CALL = CALL_ID_MAX
#: To connect for heartbeats, to a server that has just answered on another connection.
BEAT_DIAL_S = 5.0


class FrameConnection:
    """Frames over one connected socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: str) -> None:
        self._writer = writer
        self._frames = FrameReader(reader)
        #: What errors call the peer: "the local server".
        self._server = server

    async def send(self, call: Call) -> None:
        """`BadRequest` when the call has no bytes; then nothing was sent."""
        data = encode_call(call)
        try:
            await write_frames(self._writer, (data,))
        except (OSError, TimeoutError) as error:
            raise ServerUnavailable(f"{self._server} does not take calls: {told(error)}") from error

    async def receive(self) -> Answer:
        """Bounded by the heartbeat: a server that does not answer it has its connections closed by the session."""
        try:
            data = await self._frames.next(idle_s=None)
            if data is None:
                raise ServerUnavailable(f"{self._server} closed the connection")
            return decode_answer(data)
        except (OSError, TimeoutError) as error:
            raise ServerUnavailable(f"the connection to {self._server} broke: {told(error)}") from error
        except BadRequest as error:
            raise ServerUnavailable(f"what answers in place of {self._server} speaks badly: {error}") from error

    async def close(self) -> None:
        self._writer.transport.abort()  # what is not sent by now nobody waits for


async def connection_over(sock: socket.socket, server: str) -> Connection:
    """A connection that owns the socket, which is connected and non-blocking."""
    try:
        return FrameConnection(*await asyncio.open_connection(sock=sock), server)
    except BaseException:
        sock.close()
        raise


def heart_over(sock: socket.socket, session: bytes, interval_ns: int) -> Heart:
    """A native thread that beats over a connection of its own; the socket is closed, the thread has a copy. `OSError`
    when no thread can be had."""
    from tensorhub.native import Beat as NativeBeat

    with sock:
        request = frame(encode_call(Call(BEAT_CALL, Beat(SessionId(session)))))
        expected = frame(encode_answer(Answer(BEAT_CALL, Ok())))
        return NativeBeat(sock.fileno(), request, expected, interval_ns, BEAT_PATIENCE * interval_ns)


class FrameLink:
    """The server that listens at one TCP address, for as long as it does."""

    def __init__(self, name: str, at: Address) -> None:
        #: What users wrote to get here, for errors.
        self.address = name
        self.at = at

    async def own_host(self) -> str:
        return host_towards(self.at)

    async def connect(self, timeout_s: float) -> Connection:
        return await connection_over(await self._dial(timeout_s), f"{self.address} at {self.at}")

    async def beat(self, session: bytes, interval_ns: int) -> Heart:
        sock = await self._dial(BEAT_DIAL_S)
        try:
            return heart_over(sock, session, interval_ns)
        except OSError as error:
            raise ServerUnavailable(f"no heartbeat could be started: {error}") from error

    async def _dial(self, timeout_s: float) -> socket.socket:
        sock = tcp_socket(self.at.host)
        try:
            tune(sock)
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_connect(sock, (self.at.host, self.at.port))
        except (OSError, TimeoutError) as error:
            sock.close()
            tried = f"{self.address} cannot be reached at {self.at} within {timeout_s:g} s: {told(error)}"
            raise ServerUnavailable(tried) from error
        except BaseException:
            sock.close()
            raise
        return sock


def frame_link(address: str) -> FrameLink:
    """The link to `frames://HOST:PORT`; a name stands for its IPv4 number. `BadRequest` for any other address."""
    at = Address.parse(address.removeprefix(SCHEME))
    if not at.port:
        raise BadRequest(f"server address {address!r} has no port to dial; write '{SCHEME}HOST:PORT'")
    return FrameLink(address, at)


def told(error: BaseException) -> str:
    """An error in words, also one that has none."""
    return str(error) or type(error).__name__
