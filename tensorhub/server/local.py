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

from tensorhub.server.host import Host
from tensorhub.server.streams import BACKLOG, serve_streams
from tensorhub.wire.local_place import SERVER_LOCK, SOCKET, LocalPlace, check_peer, unlock

#: For a predecessor that is leaving to give the lock back.
ELECTION_S = 5.0
ELECTION_POLL_S = 0.02

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
    leaving = asyncio.create_task(_leave_when_idle(host, idle_s))
    try:
        await serve_streams(elected.listener, host, _admit, elected.resign)
    finally:
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        _LOG.info("process %d leaves %s", os.getpid(), elected.place.path)


def _admit(sock: socket.socket) -> str:
    return f"process {check_peer(sock)}"


async def _leave_when_idle(host: Host, idle_s: float) -> None:
    while (quiet_s := host.quiet_s()) < idle_s:
        await asyncio.sleep(idle_s - quiet_s)
    host.stop(f"nobody was here for {idle_s:g} s")
