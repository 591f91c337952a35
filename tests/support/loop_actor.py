"""What a Ray actor's handle is to its caller, with the actor's methods run by the caller's own event loop.

It carries calls and their outcomes; it loses, delays and reorders nothing. Never used outside tests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

from tensorhub.client.ray_calls import CallsConnection, CallsHeart
from tensorhub.errors import ServerUnavailable
from tensorhub.ports import Connection, Heart
from tensorhub.server.host import Host, Machine
from tensorhub.server.polled import PolledDoors

_COUNT = itertools.count(1)


class _Ref:
    def __init__(self, result: Awaitable[Any]) -> None:
        self._result = result

    def future(self) -> Future[Any]:
        future: Future[Any] = Future()

        async def settle() -> None:
            try:
                result = await self._result
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        task = asyncio.create_task(settle())
        future.add_done_callback(lambda _: task.done())  # holds the task: the loop alone would not
        return future


class _Method:
    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self._function = function

    def remote(self, *arguments: Any) -> _Ref:
        return _Ref(self._function(*arguments))


class LoopActor:
    """A handle: `actor.take.remote(door).future()`."""

    def __init__(self, doors: PolledDoors) -> None:
        async def open_door(peer: str) -> str:
            return doors.open(peer)

        async def close_door(door_id: str) -> None:
            doors.close(door_id)

        self.open, self.close = _Method(open_door), _Method(close_door)
        self.submit, self.take = _Method(doors.submit), _Method(doors.take)


class LoopServer:
    """Lives of a server, one after the other, that is also the link to it by calls."""

    address = "calls"

    def __init__(self, make_machine: Callable[[], Machine]) -> None:
        self._make_machine = make_machine
        self._begin()

    def _begin(self) -> None:
        self.host = Host(self._make_machine())
        self._running = asyncio.create_task(self.host.run())
        self.actor: LoopActor | None = LoopActor(PolledDoors(self.host))

    async def end(self) -> None:
        self.actor = None
        self.host.stop("ended by the test")
        await self._running

    async def restart(self) -> None:
        await self.end()
        self._begin()

    async def own_host(self) -> str:
        return "127.0.0.1"

    async def connect(self, timeout_s: float) -> Connection:
        return await self._open(timeout_s)

    async def beat(self, session: bytes, interval_ns: int) -> Heart:
        return CallsHeart(await self._open(5.0), session, interval_ns)

    async def _open(self, timeout_s: float) -> CallsConnection:
        if self.actor is None:
            raise ServerUnavailable("there is no actor")
        return await CallsConnection.open(self.actor, f"peer {next(_COUNT)}", self.address, timeout_s)


@asynccontextmanager
async def loop_server(make_machine: Callable[[], Machine]) -> AsyncIterator[LoopServer]:
    """A running server."""
    server = LoopServer(make_machine)
    try:
        yield server
    finally:
        await server.end()
