"""Serves frames on a listening stream socket, of whatever family: accepts, reads calls, writes answers, cuts off.

It decides how many connections there may be and how long each may be silent, slow or deaf; whom a socket admits is
said by its owner (`server/local.py`, `server/direct.py`), what is answered by the machine. A peer, whatever it does,
ends its own connection and no other.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Protocol

from tensorhub.errors import BadRequest, Broken, Closed, TensorHubError, Where
from tensorhub.messages import Answer, Call, Refused
from tensorhub.server.host import Door, Host
from tensorhub.wire import codec as frames_codec
from tensorhub.wire.codec import FRAME_BYTES_MAX
from tensorhub.wire.frames import WRITE_S, FrameReader, write_frames

#: Connections that wait to be accepted: every process of a large host at once.
BACKLOG = 512
#: Two connections for each of 1000 processes, and some; a process that opens more has lost count.
CONNECTIONS_MAX = 4096
#: For a connection without session that carries a heartbeat to say something; strangers have `host.HELLO_S` in all.
UNBOUND_IDLE_S = 60.0
#: What a stranger may send at once: a Hello or a Beat. It gets no memory of ours.
STRANGER_FRAME_BYTES_MAX = 64 * 1024
#: For a connection with a session the lease decides; this only says how often it is looked at.
BOUND_LOOK_S = 60.0
#: Before accepting is tried again after it failed.
ACCEPT_PAUSE_S = 0.1
#: For queued answers to go out when the server ends.
FLUSH_S = 1.0

#: What a connection's peer is called in logs; raises `TensorHubError` for one that is not to be served.
Admit = Callable[[socket.socket], str]

_LOG = logging.getLogger("tensorhub.server")


async def serve_streams(listener: socket.socket, host: Host, admit: Admit, stop_listening: Callable[[], None]) -> None:
    """Accept and run the host until it ends; then `stop_listening`, let queued answers go out, raise `Broken` if so."""
    broken: Broken | None = None
    async with asyncio.TaskGroup() as connections:
        acceptor = _Acceptor(listener, host, admit, connections)
        acceptor.start()
        try:
            await host.run()
        except Broken as error:
            broken = error  # after the group: it would cut off those who still wait for their answers
        finally:
            acceptor.stop()
            stop_listening()
    if broken is not None:
        raise broken


class _Acceptor:
    """Takes every connection that waits. Called by the loop: an accept that could be cancelled could lose a socket."""

    def __init__(self, listener: socket.socket, host: Host, admit: Admit, connections: asyncio.TaskGroup) -> None:
        self._listener = listener
        self._host = host
        self._admit = admit
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        #: Waits to start again after a failed accept; None while accepting, and once stopped.
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def stop(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._loop.remove_reader(self._listener)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no descriptors left, most of all: those who are served go on
                _LOG.warning("cannot accept a connection: %s", error)
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(ACCEPT_PAUSE_S, self.start)
                return
            if self._host.doors >= CONNECTIONS_MAX:
                _LOG.warning("a connection is refused: %d are open", CONNECTIONS_MAX)
                sock.close()
                continue
            self._connections.create_task(_serve_connection(sock, self._host, self._admit))


async def _serve_connection(sock: socket.socket, host: Host, admit: Admit) -> None:
    """One connection from accept to close. Whatever its peer does ends here."""
    try:
        door = host.open(admit(sock))
    except (TensorHubError, OSError) as error:
        _LOG.warning("a connection is refused: %s", error)
        sock.close()
        return
    reader, writer = await asyncio.open_connection(sock=sock)
    reading = asyncio.create_task(_read_calls(reader, door))
    try:
        while answers := await door.take():
            await write_frames(writer, [bytes_of(answer) for answer in answers], FLUSH_S if door.closed else WRITE_S)
    except TimeoutError:
        _LOG.warning("%s does not read: its connection is dropped", door.peer)
    except OSError as error:
        _LOG.debug("%s is gone: %s", door.peer, error)
    except Exception:  # noqa: BLE001 - our fault, and still one connection's: the others go on
        _LOG.exception("the connection of %s broke", door.peer)
    finally:
        door.close("its connection ended")
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await _close(writer)


async def _close(writer: asyncio.StreamWriter) -> None:
    """Close after what is written has gone out, or cut off a peer that does not take it."""
    writer.close()
    try:
        async with asyncio.timeout(FLUSH_S):
            await writer.wait_closed()
    except (TimeoutError, OSError):
        writer.transport.abort()


async def _read_calls(reader: asyncio.StreamReader, door: Door) -> None:
    """Calls into the door until the stream ends; closes the door with the reason."""
    frames = FrameReader(reader)
    reason = "its peer closed the connection"
    try:
        while door.closed is None:
            try:
                idle_s = BOUND_LOOK_S if door.session is not None else UNBOUND_IDLE_S
                data = await frames.next(FRAME_BYTES_MAX if door.known else STRANGER_FRAME_BYTES_MAX, idle_s=idle_s)
            except TimeoutError:
                if door.session is None or frames.pending:
                    raise
                continue
            if data is None:
                break
            await submit(data, door)
    except BadRequest as error:
        reason = cut_off(door, error)
    except TimeoutError:
        reason = "it was silent for too long"
    except (OSError, Closed) as error:
        reason = str(error)
    finally:
        door.close(reason)


class Codec(Protocol):
    """The bytes of messages, as the modules `wire.codec` and `wire.proto` have them."""

    def call_id_of(self, data: bytes) -> int: ...
    def decode_call(self, data: bytes) -> Call: ...
    def encode_answer(self, answer: Answer) -> bytes: ...


async def submit(data: bytes, door: Door, codec: Codec = frames_codec) -> None:
    """A call that cannot be read is refused to its caller; without a caller the peer is no good: `BadRequest`."""
    if not door.known and len(data) > STRANGER_FRAME_BYTES_MAX:
        raise BadRequest(f"a frame of {len(data)} bytes before Hello; {STRANGER_FRAME_BYTES_MAX} is the most")
    try:
        call = codec.decode_call(data)
    except BadRequest as error:
        call_id = codec.call_id_of(data)
        if call_id == 0:
            raise
        _LOG.warning("%s #%d refused: %s", door.peer, call_id, error)
        door.put(Answer(call_id, Refused("BadRequest", error.message, Where())))
        return
    await door.submit(call)


def cut_off(door: Door, error: BadRequest) -> str:
    """Tell a peer that speaks badly why its door is closed next; the reason to close it with."""
    _LOG.warning("%s speaks badly and is cut off: %s", door.peer, error)
    door.put(Answer(0, Refused("BadRequest", error.message, Where())))
    return error.message


def bytes_of(answer: Answer, codec: Codec = frames_codec) -> bytes:
    """The answer's frame; that of a refusal when the answer fits in none."""
    try:
        return codec.encode_answer(answer)
    except BadRequest as error:  # too large for a frame, most of all: its caller may ask for less
        _LOG.warning("an answer cannot be sent: %s", error)
        return codec.encode_answer(Answer(answer.id, Refused("BadRequest", error.message, Where())))
