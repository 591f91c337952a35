"""The control network between processes and the server: late, cut, silent; in order, as every real link is.

A message is lost only with its connection; it is duplicated only as the protocol does it, by being asked again on the
next one. The heart travels on a connection and a strand of its own.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

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
        self,
        host: Callable[[Process], Host],
        rng: random.Random,
        tap: Callable[[Process, Request | Reply | Notice], None],
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
        self._parted: set[Process] = set()

    def delay_s(self) -> float:
        return DELAY_S + self._rng.random() * self.lateness_s

    def arrival_s(self, before: Sequence[tuple[float, object]]) -> float:
        """When what is sent now arrives: not before what was sent before it."""
        at_s = asyncio.get_running_loop().time() + self.delay_s()
        return max(at_s, before[-1][0]) if before else at_s

    def connect(self, process: Process) -> SimConnection:
        if process in self._parted or process.dead:
            raise ServerUnavailable("no route to the server")
        try:
            host = self.host(process)
            door = host.open(process.name)
        except Closed as error:
            raise ServerUnavailable(error.message) from error
        connection = SimConnection(self, process, host, door)
        self._open.setdefault(process, []).append(connection)
        return connection

    def forget(self, connection: SimConnection) -> None:
        if connection in self._open.get(connection.process, ()):
            self._open[connection.process].remove(connection)

    def cut(self, process: Process, why: str) -> None:
        """Break its connections; what was under way is lost."""
        for connection in self._open.pop(process, []):
            connection.break_off(why)

    def hang_up(self, host: Host, why: str) -> None:
        """This server is dead: what was under way is lost, in both directions; peers hear of it as of anything else."""
        for connections in list(self._open.values()):
            for connection in list(connections):
                if connection.host is host:
                    connection.hang_up(why)

    def part(self, process: Process) -> None:
        """Nothing goes through in either direction, and nothing breaks, until `join`."""
        self._parted.add(process)

    def join(self, process: Process) -> None:
        if process in self._parted:
            self._parted.discard(process)
            for connection in self._open.get(process, ()):
                connection.flush()

    def is_open(self, process: Process) -> bool:
        """Whether what arrives gets through."""
        return process not in self._parted


class SimConnection:
    """`ports.Connection`: messages on their way up and down, in order; each is the network's until it arrives."""

    def __init__(self, network: Network, process: Process, host: Host, door: Door) -> None:
        self.process, self.host = process, host
        self._network = network
        self._door = door
        #: What was sent and has not arrived, oldest first, with when it is to arrive at the earliest.
        self._up: deque[tuple[float, Call]] = deque()
        #: None is the server's last word: it has closed.
        self._down: deque[tuple[float, Answer | None]] = deque()
        self._inbox: deque[Answer] = deque()
        self._arrived = asyncio.Event()
        self._lost: str | None = None
        self._loop = asyncio.get_running_loop()
        self._taking = self._loop.create_task(self._take(), context=network.context)

    async def send(self, call: Call) -> None:
        if self._lost is not None:
            raise ServerUnavailable(self._lost)
        at_s = self._network.arrival_s(self._up)
        self._up.append((at_s, call))
        self._loop.call_at(at_s, self._arrive_up, context=self._network.context)

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
            self._up.clear()
            self._down.clear()
            self._arrived.set()
            self._door.close(why)
            self._taking.cancel()

    def hang_up(self, why: str) -> None:
        """The other end is dead; this one learns of it when the news arrives."""
        self._up.clear()
        self._down.clear()
        self._door.close(why)

    def flush(self) -> None:
        """A partition is over: what waited at it goes on."""
        self._loop.call_soon(self._arrive_up, context=self._network.context)
        self._loop.call_soon(self._arrive_down, context=self._network.context)

    def _arrive_up(self) -> None:
        while self._up and self._up[0][0] <= self._loop.time() and self._network.is_open(self.process):
            _, call = self._up.popleft()
            try:
                _at_once(self._door.submit(call))
            except Closed as error:
                self.break_off(error.message)
                return
            self._network.tap(self.process, call.request)
            if isinstance(call.request, Done) and self.process in self._network.fragile:
                self._network.fragile.discard(self.process)
                self._network.part(self.process)

    async def _take(self) -> None:
        while answers := await self._door.take():
            for answer in answers:
                self._send_down(answer)
        self._send_down(None)

    def _send_down(self, answer: Answer | None) -> None:
        at_s = self._network.arrival_s(self._down)
        self._down.append((at_s, answer))
        self._loop.call_at(at_s, self._arrive_down, context=self._network.context)

    def _arrive_down(self) -> None:
        while self._down and self._down[0][0] <= self._loop.time() and self._network.is_open(self.process):
            _, answer = self._down.popleft()
            if answer is None:
                self.break_off(f"the server closed it: {self._door.closed}")
                return
            self._network.tap(self.process, answer.reply)
            self._inbox.append(answer)
            self._arrived.set()


def _at_once(submission: Coroutine[Any, Any, None]) -> None:
    """The host takes what comes before anything else can come: nobody waits for room."""
    try:
        submission.send(None)
    except StopIteration:
        return
    submission.close()
    raise AssertionError("a simulated server has more calls queued than it takes")


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
