"""A link without sockets: the client's session and the server's host meet in one event loop, on its clock.

It carries messages as they are and beats by a task; it passes the same conformance suite as the links with sockets.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from tensorhub.errors import Broken, Closed, ServerUnavailable
from tensorhub.messages import Answer, Beat, Call, Ok
from tensorhub.ports import Connection, Heart
from tensorhub.server.host import Door, Host, Machine
from tensorhub.types import SessionId

BEAT_PATIENCE = 3


class DirectConnection:
    def __init__(self, door: Door) -> None:
        self._door = door
        self._answers: deque[Answer] = deque()

    async def send(self, call: Call) -> None:
        try:
            await self._door.submit(call)
        except Closed as error:
            raise ServerUnavailable(error.message) from error

    async def receive(self) -> Answer:
        if not self._answers:
            self._answers.extend(await self._door.take())
        if not self._answers:
            raise ServerUnavailable(f"connection closed: {self._door.closed}")
        return self._answers.popleft()

    async def close(self) -> None:
        self._door.close("its peer closed the connection")


class DirectHeart:
    def __init__(self, connection: DirectConnection, session: SessionId, interval_s: float) -> None:
        self._acknowledged_ns = 0
        self._failed: str | None = None
        self._task = asyncio.create_task(self._beat(connection, session, interval_s))

    def acknowledged_ns(self) -> int:
        return self._acknowledged_ns

    def failed(self) -> str | None:
        return self._failed

    def stop(self) -> None:
        self._failed = self._failed or "stopped"
        self._task.cancel()

    async def _beat(self, connection: DirectConnection, session: SessionId, interval_s: float) -> None:
        try:
            while True:
                sent_ns = round(asyncio.get_running_loop().time() * 1e9)
                async with asyncio.timeout(BEAT_PATIENCE * interval_s):
                    await connection.send(Call(1, Beat(session)))
                    answer = await connection.receive()
                if answer != Answer(1, Ok()):
                    self._failed = f"another reply than expected: {answer.reply}"
                    return
                self._acknowledged_ns = sent_ns
                await asyncio.sleep(interval_s)
        except (ServerUnavailable, TimeoutError) as error:
            self._failed = str(error) or "no reply in time"
        finally:
            await connection.close()


class DirectServer:
    """A server's lives in this loop: `restart` begins the next one with a fresh machine."""

    address = "direct"

    def __init__(self, make_machine: Callable[[], Machine]) -> None:
        self._make_machine = make_machine
        self.doors: list[Door] = []
        #: False: connections are refused, as when nobody listens.
        self.reachable = True
        self._running: asyncio.Task[None] | None = None
        self._begin()

    async def own_host(self) -> str:
        return "127.0.0.1"

    async def connect(self, timeout_s: float) -> Connection:
        return self._open()

    async def beat(self, session: bytes, interval_ns: int) -> Heart:
        return DirectHeart(self._open(), SessionId(session), interval_ns / 1e9)

    def cut(self) -> None:
        """Break every connection; the server lives on."""
        for door in self.doors:
            door.close("cut")
        self.doors.clear()

    async def end(self) -> None:
        """Kill the server."""
        self.host.stop("killed")
        with suppress(Broken):
            await self._running
        self.cut()

    async def restart(self) -> None:
        """A new, empty life."""
        await self.end()
        self._begin()

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        self.machine = self._make_machine()
        self.host = Host(self.machine, lambda: round(loop.time() * 1e9))
        self._running = asyncio.create_task(self.host.run())

    def _open(self) -> DirectConnection:
        if not self.reachable:
            raise ServerUnavailable("nobody listens")
        try:
            door = self.host.open("a direct peer")
        except Closed as error:
            raise ServerUnavailable(error.message) from error
        self.doors.append(door)
        return DirectConnection(door)


@asynccontextmanager
async def direct_server(make_machine: Callable[[], Machine]) -> AsyncIterator[DirectServer]:
    """A running server that is also the link to it."""
    server = DirectServer(make_machine)
    try:
        yield server
    finally:
        await server.end()
