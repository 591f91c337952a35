"""The control network between processes and the server: late, cut, silent; in order, as every real link is.

A message is lost only with its connection; it is duplicated only as the protocol does it, by being asked again on the
next one. The heart travels on a connection and a strand of its own.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING

from tensorhub.errors import Closed, ServerUnavailable
from tensorhub.messages import Answer, Call, Done, Notice, Reply, Request
from tensorhub.ports import Connection, Heart
from tensorhub.server.host import Door, Host
from tensorhub.types import SessionId
from tests.support.direct_link import DirectHeart

if TYPE_CHECKING:
    from tests.sim.process import Process

DELAY_S = 0.0005


class Network:
    """Every connection of a world. `tap` hears each message when it arrives."""

    def __init__(
        self, host: Callable[[], Host], rng: random.Random, tap: Callable[[Process, Request | Reply | Notice], None]
    ) -> None:
        self.host = host
        self.tap = tap
        #: Added to each message, times a random 0 to 1.
        self.lateness_s = 0.0
        #: Runs what belongs to the network: no process can stop it.
        self.context: Context = copy_context()
        self._rng = rng
        self._open: dict[Process, list[SimConnection]] = {}
        #: Processes whose next commit is the last that is heard of them for a while.
        self.fragile: set[Process] = set()
        #: {process: set when its partition ends}.
        self._parted: dict[Process, asyncio.Event] = {}

    def delay_s(self) -> float:
        return DELAY_S + self._rng.random() * self.lateness_s

    def connect(self, process: Process) -> SimConnection:
        if process in self._parted or process.dead:
            raise ServerUnavailable("no route to the server")
        try:
            door = self.host().open(process.name)
        except Closed as error:
            raise ServerUnavailable(error.message) from error
        connection = SimConnection(self, process, door)
        self._open.setdefault(process, []).append(connection)
        return connection

    def forget(self, connection: SimConnection) -> None:
        if connection in self._open.get(connection.process, ()):
            self._open[connection.process].remove(connection)

    def cut(self, process: Process, why: str) -> None:
        """Break its connections; what was under way is lost."""
        for connection in self._open.pop(process, []):
            connection.break_off(why)

    def part(self, process: Process) -> None:
        """Nothing goes through in either direction, and nothing breaks, until `join`."""
        self._parted.setdefault(process, asyncio.Event())

    def join(self, process: Process) -> None:
        parted = self._parted.pop(process, None)
        if parted is not None:
            parted.set()

    async def passage(self, process: Process) -> None:
        """Wait while there is none."""
        while (parted := self._parted.get(process)) is not None:
            await parted.wait()


class SimConnection:
    """`ports.Connection`: two queues, each emptied by a task of the network."""

    def __init__(self, network: Network, process: Process, door: Door) -> None:
        self.process = process
        self._network = network
        self._door = door
        self._up: deque[tuple[float, Call]] = deque()
        self._inbox: deque[Answer] = deque()
        self._sent, self._arrived = asyncio.Event(), asyncio.Event()
        self._lost: str | None = None
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(work, context=network.context) for work in (self._pump_up(), self._pump_down())]

    async def send(self, call: Call) -> None:
        if self._lost is not None:
            raise ServerUnavailable(self._lost)
        self._up.append((asyncio.get_running_loop().time() + self._network.delay_s(), call))
        self._sent.set()

    async def receive(self) -> Answer:
        while not self._inbox:
            if self._lost is not None:
                raise ServerUnavailable(f"connection closed: {self._lost}")
            self._arrived.clear()
            await self._arrived.wait()
        return self._inbox.popleft()

    async def close(self) -> None:
        self._network.forget(self)
        self.break_off("closed by this side")

    def break_off(self, why: str) -> None:
        """Both ends learn of it; what was under way is lost. Idempotent."""
        if self._lost is None:
            self._lost = why
            self._arrived.set()
            self._door.close(why)
            for task in self._tasks:
                task.cancel()

    async def _pump_up(self) -> None:
        while True:
            while not self._up:
                self._sent.clear()
                await self._sent.wait()
            at_s, call = self._up.popleft()
            await self._travel(at_s)
            try:
                await self._door.submit(call)
            except Closed as error:
                self.break_off(error.message)
                return
            self._network.tap(self.process, call.request)
            if isinstance(call.request, Done) and self.process in self._network.fragile:
                self._network.fragile.discard(self.process)
                self._network.part(self.process)

    async def _pump_down(self) -> None:
        while answers := await self._door.take():
            at_s = asyncio.get_running_loop().time() + self._network.delay_s()
            for answer in answers:
                await self._travel(at_s)
                self._network.tap(self.process, answer.reply)
                self._inbox.append(answer)
                self._arrived.set()
        self.break_off(f"the server closed it: {self._door.closed}")

    async def _travel(self, at_s: float) -> None:
        left_s = at_s - asyncio.get_running_loop().time()
        if left_s > 0:
            await asyncio.sleep(left_s)
        await self._network.passage(self.process)


class SimLink:
    """`ports.Link` of one process."""

    address = "simulated"

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    async def connect(self, timeout_s: float) -> Connection:
        await asyncio.sleep(self._network.delay_s())
        return self._network.connect(self._process)

    async def beat(self, session: bytes, interval_ns: int) -> Heart:
        connection = self._network.connect(self._process)
        heart = self._process.heart.context.copy()
        # The direct link's heart needs of a connection only what every connection has.
        return heart.run(DirectHeart, connection, SessionId(session), interval_ns / 1e9)  # type: ignore[arg-type]
