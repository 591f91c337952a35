"""A cluster on virtual time: one server, its network, its data plane, and a process in every place.

It decides who sits where and in which life. It knows nothing of what is done (`workload.py`), what goes wrong
(`faults.py`) or what would be a mistake (`checkers.py`). The server lives as long as the world: `server_task` is the
one place where a later life would begin.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from tensorhub.errors import Broken, TensorHubError
from tensorhub.messages import Beat, Hello, Notice, Ok, Progress, Reply, Request
from tensorhub.server.host import Host
from tensorhub.server.machine import Machine
from tensorhub.server.settings import SECOND_NS, Settings
from tensorhub.server.turn import Outgoing
from tensorhub.types import Epoch, Location, ModelKey, ReplicaId, Seat, SessionId
from tests.sim.checkers import Checkers
from tests.sim.content import draw_layout
from tests.sim.marks import Marks
from tests.sim.memory import DataPlane
from tests.sim.network import Network
from tests.sim.process import OPEN_S, Place, Process
from tests.sim.trace import Trace, brief, told
from tests.support.virtual_time import VirtualLoop

SETTINGS = Settings(lease_ns=6 * SECOND_NS, beat_ns=2 * SECOND_NS, quarantine_ns=6 * SECOND_NS)
LEASE_S = SETTINGS.lease_ns / 1e9
#: Without progress for so long, a reader gives its source up: short beside a lease, long beside a shard.
STALL_S = 3.0
#: Of the machine's steps one in so many, at least, is looked at.
CHECK_GAP_MAX = 24
#: Between two attempts to start a process whose seat is still taken, or that reaches no server.
RESTART_S = 1.0


class CheckedMachine:
    """The machine, whose invariants are checked after some of its steps: a check looks at everything.

    What breaks a promise leaves it broken for a while: a look at one step of a few finds it almost as soon, for much
    less. `gap` says after how many steps the next look comes.
    """

    def __init__(self, inner: Machine, gap: Callable[[], int]) -> None:
        self.inner = inner
        self._gap, self._steps_left = gap, gap()

    def receive(self, now_ns: int, sender: SessionId, call: int, request: Request) -> list[Outgoing]:
        out = self.inner.receive(now_ns, sender, call, request)
        if not isinstance(request, Beat):
            self._check()
        return out

    def disconnected(self, now_ns: int, sender: SessionId) -> list[Outgoing]:
        out = self.inner.disconnected(now_ns, sender)
        self._check()
        return out

    def tick(self, now_ns: int) -> list[Outgoing]:
        out = self.inner.tick(now_ns)
        self._check()
        return out

    def _check(self) -> None:
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._steps_left = self._gap()
            self.inner.check()

    def next_deadline_ns(self) -> int | None:
        return self.inner.next_deadline_ns()


@dataclass
class Outcome:
    """How an operation of a process ended: `value`, `error`, or neither when the process died."""

    process: Process
    value: Any = None
    error: TensorHubError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and not self.process.dead


class World:
    """Everything of one run."""

    def __init__(self, seed: int, *, echo: bool, check_every: int = 0, stall_s: float = STALL_S) -> None:
        self.seed = seed
        #: Of every process: without progress for so long, a reader gives its source up.
        self.stall_s = stall_s
        self.rng = random.Random(f"{seed} world")
        self.trace = Trace(echo=echo)
        self.marks = Marks()
        self.places = draw_places(random.Random(f"{seed} places"))
        self.digest_lateness_s = self.rng.choice([0.001, 0.05, 0.5])
        self.plane = DataPlane(random.Random(f"{seed} reads"), self.marks)
        self.machine = Machine(Epoch(self.rng.randbytes(16)), SETTINGS)
        loop = asyncio.get_running_loop()
        self._began_s = loop.time()
        #: After how many steps the machine is checked; 0: drawn anew each time.
        self._check_every = check_every
        self._check_rng = random.Random(f"{seed} checks")
        self.host = Host(CheckedMachine(self.machine, self._gap), lambda: round(loop.time() * 1e9))
        self.server_task = asyncio.create_task(self.host.run())
        self.network = Network(lambda: self.host, random.Random(f"{seed} network"), self._tap)
        self.checkers = Checkers(self)
        loop.set_exception_handler(lambda _, context: self.checkers.unheard(context))
        #: {name of a place: who sits there now, dead or alive}.
        self.processes: dict[str, Process] = {}
        #: Frozen ones whose successors have their places.
        self.replaced: list[Process] = []
        self._lives: dict[str, int] = {}
        self._context = copy_context()
        #: False from the moment on at which nothing goes wrong any more.
        self.chaos = True

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._began_s

    def _gap(self) -> int:
        return self._check_every or self._check_rng.randint(1, CHECK_GAP_MAX)

    def events(self) -> int:
        """Callbacks that the loop has run."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return loop.events

    def check(self) -> None:
        """The machine's invariants, now."""
        try:
            self.machine.check()
        except Broken as broken:
            self.checkers.broken(broken)

    def place_anew(self, place: Place) -> Process:
        """A process that has not started yet takes the place of whoever was there."""
        self._lives[place.name] = self._lives.get(place.name, 0) + 1
        old = self.processes.get(place.name)
        if old is not None and not old.dead:
            self.replaced.append(old)
        process = self.processes[place.name] = self._context.run(Process, self, place, self._lives[place.name])
        return process

    async def living(self, places: Sequence[Place]) -> list[Process]:
        """A started process in each place; starts what is missing, as often as it takes."""
        return list(await asyncio.gather(*(self._living(place) for place in places)))

    async def _living(self, place: Place) -> Process:
        while True:
            process = self.processes.get(place.name)
            if process is None or process.dead:
                process = self.place_anew(place)
            if not process.is_usable and not process.started:
                await self.perform(process, "start", process.start, 2 * OPEN_S)
            if process.is_usable:
                return process
            await process.kill()
            await asyncio.sleep(RESTART_S)

    async def perform(
        self, process: Process, what: str, work: Callable[[], Coroutine[Any, Any, Any]], timeout_s: float
    ) -> Outcome:
        """Have a process do something; its end is waited for, in whatever way it comes."""
        outcome = Outcome(process)

        async def run() -> None:
            try:
                outcome.value = await work()
            except TensorHubError as error:
                outcome.error = error

        self.trace.add(process.name, f"{what} ...")
        watch = self.checkers.began(process, what, timeout_s)
        task = process.strand.spawn(run())
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is not None:
            self.checkers.broke(process, what, task.exception())
        self.checkers.ended(watch, outcome.error)
        how = told(outcome.error) if outcome.error is not None else "killed" if process.dead else "ok"
        self.trace.add(process.name, f"{what} -> {how}")
        return outcome

    async def end(self) -> None:
        """Stop the server."""
        self.host.stop("the world ends")
        await asyncio.wait([self.server_task])

    def _tap(self, process: Process, message: Request | Reply | Notice) -> None:
        if not isinstance(message, Beat | Ok | Progress | Hello):
            self.trace.add(process.name, f". {brief(message)}")
        self.checkers.heard(process, message)


def draw_places(rng: random.Random) -> list[Place]:
    """One trainer and some rollouts for each model, all of one job."""
    models = 1 if rng.random() < 0.8 else 2
    places: list[Place] = []
    for m in range(models):
        model = ModelKey("job", ("actor", "draft")[m])
        shards = rng.choice([1, 1, 2, 3])
        layouts = [draw_layout(rng, m + 1, shard) for shard in range(shards)]
        replicas = ["trainer"] + [f"roll-{i}" for i in range(rng.randint(2, 4) if models == 1 else 2)]
        for replica in replicas:
            spot, rack = rng.random() < 0.3, rng.randint(1, 2)
            for shard in range(shards):
                location = Location(("dc1", f"r{rack}", f"{replica}-{shard}"))
                seat = Seat(model, ReplicaId(replica), shard)
                places.append(Place(seat, shards, layouts[shard], replica == "trainer", spot, location))
    return places
