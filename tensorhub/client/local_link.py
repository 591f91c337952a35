"""The way to the local server: a Unix socket, and a server started when nobody listens.

It decides when to start a server and how long to wait for it; who serves is decided by the lock the server takes
(`server/local.py`). It never retries a call: a connection that breaks says so, the session goes on from there.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import tensorhub
from tensorhub.client.frame_link import connection_over, heart_over
from tensorhub.errors import NoServer, ServerUnavailable, TensorHubError
from tensorhub.ports import Connection, Heart
from tensorhub.transport.route import LOOPBACK
from tensorhub.wire.local_place import LOG, START_LOCK, LocalPlace, unlock

#: Between two looks at a socket that is not there yet.
POLL_S = 0.02
#: One client starts the server, the others wait; but no longer than this for a starter that was stopped or killed.
START_PATIENCE_S = 3.0
#: For a server that was started to listen, before another is tried.
START_S = 10.0
#: What errors call it.
SERVER = "the local server"


class LocalLink:
    """`local` or `local:NAME`: the server of this user on this host, in a namespace of its own if named."""

    def __init__(self, address: str, name: str, may_start: bool = True) -> None:
        self.address = address
        self._name = name
        self._may_start = may_start

    async def own_host(self) -> str:
        return LOOPBACK  # whoever reaches a Unix socket is here

    async def connect(self, timeout_s: float) -> Connection:
        """Connect, starting the server where there is none; `ServerUnavailable` tells what its log says, `NoServer`
        that there is none and this link may not start it."""
        place = LocalPlace.open(self._name)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._connect(place)
        except TimeoutError as error:
            raise _unavailable(place, f"no local server answered within {timeout_s:g} s") from error
        except OSError as error:
            raise _unavailable(place, f"the local server cannot be reached: {error}") from error
        finally:
            place.close()

    async def beat(self, session: bytes, interval_ns: int) -> Heart:
        """A native thread that beats on a connection of its own."""
        place = LocalPlace.open(self._name)
        try:
            sock = place.connect()
            if sock is None:
                raise _unavailable(place, "the local server took no connection for heartbeats")
            return heart_over(sock, session, interval_ns)
        except OSError as error:
            raise _unavailable(place, f"no heartbeat could be started: {error}") from error
        finally:
            place.close()

    async def _connect(self, place: LocalPlace) -> Connection:
        loop = asyncio.get_running_loop()
        began = start_again = loop.time()
        while True:
            sock = place.connect()
            if sock is not None:
                return await connection_over(sock, SERVER)
            if not self._may_start and not place.has_listener():
                raise NoServer(
                    f"no local server {self._name!r} runs for this user on this host; the first hub that is opened "
                    f"with server={self.address!r} starts it"
                )
            if self._may_start and loop.time() >= start_again:
                starting = place.lock(START_LOCK)
                if starting is not None or loop.time() - began > START_PATIENCE_S:
                    await self._start(place, starting)
                    start_again = loop.time() + START_S
                    continue
            await asyncio.sleep(POLL_S)

    async def _start(self, place: LocalPlace, starting: int | None) -> None:
        """Start a server and wait until it listens, holding the lock that keeps others from doing the same.

        The lock only spares the host a herd of processes; that there is one server is the server's own lock's doing.
        """
        try:
            if (sock := place.connect()) is not None:
                sock.close()  # started while we took the lock
                return
            await _spawn(self._name, place)
            deadline = asyncio.get_running_loop().time() + START_S
            while asyncio.get_running_loop().time() < deadline:
                sock = place.connect()
                if sock is not None:
                    sock.close()
                    return
                await asyncio.sleep(POLL_S)
        finally:
            if starting is not None:
                unlock(starting)


async def _spawn(name: str, place: LocalPlace) -> None:
    """Run the command that puts a server into the background; `ServerUnavailable` when it fails."""
    root = str(Path(tensorhub.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    log = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=place.fd)
    try:
        starter = subprocess.Popen(  # noqa: S603 - our own module, by our own interpreter
            [sys.executable, "-m", "tensorhub.server", "local", "--name", name, "--detach"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
    finally:
        os.close(log)
    try:
        while (status := starter.poll()) is None:
            await asyncio.sleep(POLL_S)
    except BaseException:
        starter.kill()
        starter.wait()
        raise
    if status != 0:
        raise _unavailable(place, f"the local server cannot start: its starter ended with status {status}")


def _unavailable(place: LocalPlace, message: str) -> TensorHubError:
    tail = place.log_tail()
    log = f"; its log ({place.path}/{LOG}) ends with:\n{tail}" if tail else f"; it has no log in {place.path}"
    return ServerUnavailable(message + log)
