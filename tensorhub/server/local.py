"""The local server: one small process of this user on this host, spoken to over a Unix socket.

It decides that there is one (whoever holds the lock), whom it serves (this user) and when it leaves (nobody there for
`idle_s`); what it answers is the machine's. Only the holder of the lock replaces the socket; it takes the socket's
name away before it stops listening, so a client that comes at that moment sees a closed connection, not a silent one,
and elects the next server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from dataclasses import dataclass

from tensorhub.errors import BadRequest, Broken, Closed, TensorHubError, Where
from tensorhub.messages import Answer, Refused
from tensorhub.server.host import Door, Host
from tensorhub.wire.codec import call_id_of, decode_call, encode_answer
from tensorhub.wire.frames import WRITE_S, FrameReader, write_frames
from tensorhub.wire.local_place import SERVER_LOCK, SOCKET, LocalPlace, check_peer, unlock

#: Connections that wait to be accepted: every process of a large host at once.
BACKLOG = 512
#: Two connections for each of 1000 processes, and some; a process that opens more has lost count.
CONNECTIONS_MAX = 4096
#: For a connection without session (a heartbeat, or one that never says anything) to say something.
UNBOUND_IDLE_S = 60.0
#: For a connection with a session the lease decides; this only says how often it is looked at.
BOUND_LOOK_S = 60.0
#: For a predecessor that is leaving to give the lock back.
ELECTION_S = 5.0
ELECTION_POLL_S = 0.02
#: Before accepting is tried again after it failed.
ACCEPT_PAUSE_S = 0.1
#: For queued answers to go out when the server ends.
FLUSH_S = 1.0

_LOG = logging.getLogger("tensorhub.server")


@dataclass(frozen=True, slots=True)
class Elected:
    """The lock, and the socket that only its holder may bind."""

    place: LocalPlace
    lock: int
    listener: socket.socket

    def resign(self) -> None:
        """Take the name away, stop listening, give the lock back: in this order."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET, dir_fd=self.place.fd)
        self.listener.close()
        unlock(self.lock)
        self.place.close()


async def elect(name: str) -> Elected | None:
    """Become the local server `name`, or None when another one serves (or the lock stays taken for `ELECTION_S`)."""
    place = LocalPlace.open(name)
    try:
        async with asyncio.timeout(ELECTION_S):
            while (lock := place.lock(SERVER_LOCK)) is None:
                if (served := place.connect()) is not None:
                    served.close()
                    place.close()
                    return None
                await asyncio.sleep(ELECTION_POLL_S)
    except TimeoutError:
        _LOG.warning("another process holds the lock in %s and does not serve", place.path)
        place.close()
        return None
    return Elected(place, lock, _listen(place))


def _listen(place: LocalPlace) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SOCKET, dir_fd=place.fd)  # left by a server that was killed: we hold its lock
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    listener.bind(place.socket_path)
    os.chmod(place.socket_path, 0o600)
    listener.listen(BACKLOG)
    return listener


async def serve(elected: Elected, host: Host, idle_s: float) -> None:
    """Serve until nobody was there for `idle_s`, or SIGTERM or SIGINT came; `Broken` when the machine broke."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, host.stop, f"signal {signal.Signals(number).name}")
    _LOG.info("process %d serves %s", os.getpid(), elected.place.path)
    broken: Broken | None = None
    async with asyncio.TaskGroup() as connections:
        loop.add_reader(elected.listener, _accept, elected.listener, host, connections)
        leaving = connections.create_task(_leave_when_idle(host, idle_s))
        try:
            await host.run()
        except Broken as error:
            broken = error
        finally:
            leaving.cancel()
            loop.remove_reader(elected.listener)
            elected.resign()
    _LOG.info("process %d leaves %s", os.getpid(), elected.place.path)
    if broken is not None:
        raise broken


async def _leave_when_idle(host: Host, idle_s: float) -> None:
    while (quiet_s := host.quiet_s()) < idle_s:
        await asyncio.sleep(idle_s - quiet_s)
    host.stop(f"nobody was here for {idle_s:g} s")


def _accept(listener: socket.socket, host: Host, connections: asyncio.TaskGroup) -> None:
    """Take every connection that waits. Called by the loop: an accept that could be cancelled could lose a socket."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptors left, most of all: those who are served go on
            _LOG.warning("cannot accept a connection: %s", error)
            loop.remove_reader(listener)
            loop.call_later(ACCEPT_PAUSE_S, _accept_again, listener, host, connections)
            return
        if host.doors >= CONNECTIONS_MAX:
            _LOG.warning("a connection is refused: %d are open", CONNECTIONS_MAX)
            sock.close()
            continue
        connections.create_task(_serve_connection(sock, host))


def _accept_again(listener: socket.socket, host: Host, connections: asyncio.TaskGroup) -> None:
    if listener.fileno() >= 0:
        asyncio.get_running_loop().add_reader(listener, _accept, listener, host, connections)


async def _serve_connection(sock: socket.socket, host: Host) -> None:
    """One connection from accept to close. Whatever its peer does ends here."""
    try:
        door = host.open(f"process {check_peer(sock)}")
    except TensorHubError as error:
        _LOG.warning("a connection is refused: %s", error)
        sock.close()
        return
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    reading = asyncio.create_task(_read_calls(reader, door))
    try:
        while answers := await door.take():
            await write_frames(writer, [_bytes_of(answer) for answer in answers], FLUSH_S if door.closed else WRITE_S)
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
                data = await frames.next(idle_s=BOUND_LOOK_S if door.session is not None else UNBOUND_IDLE_S)
            except TimeoutError:
                if door.session is None or frames.pending:
                    raise
                continue
            if data is None:
                break
            await _submit(data, door)
    except BadRequest as error:
        _LOG.warning("%s speaks badly and is cut off: %s", door.peer, error)
        door.put(Answer(0, Refused("BadRequest", error.message, Where())))
        reason = error.message
    except TimeoutError:
        reason = "it was silent for too long"
    except (OSError, Closed) as error:
        reason = str(error)
    finally:
        door.close(reason)


async def _submit(data: bytes, door: Door) -> None:
    """A call that cannot be read is refused to its caller; without a caller the stream is no good: `BadRequest`."""
    try:
        call = decode_call(data)
    except BadRequest as error:
        call_id = call_id_of(data)
        if call_id == 0:
            raise
        _LOG.warning("%s #%d refused: %s", door.peer, call_id, error)
        door.put(Answer(call_id, Refused("BadRequest", error.message, Where())))
        return
    await door.submit(call)


def _bytes_of(answer: Answer) -> bytes:
    try:
        return encode_answer(answer)
    except BadRequest as error:  # too large for a frame, most of all: its caller may ask for less
        _LOG.warning("an answer cannot be sent: %s", error)
        return encode_answer(Answer(answer.id, Refused("BadRequest", error.message, Where())))
