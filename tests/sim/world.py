"""A cluster on virtual time: one server, its network, its data plane, and a process in every place.

It decides who sits where and in which life. It knows nothing of what is done (`workload.py`), what goes wrong
(`faults.py`) or what would be a mistake (`checkers.py`). The server has lives, too: each begins empty, with an epoch of
its own, under the same name; `split` has two of them serve at once.
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
from tensorhub.types import ID_BYTES, Location, ModelKey, ReplicaId, Seat
from tests.sim.checkers import Checkers
from tests.sim.content import draw_layout
from tests.sim.marks import Marks
from tests.sim.memory import DataPlane
from tests.sim.network import Network
from tests.sim.process import OPEN_S, Place, Process
from tests.sim.server import Life
from tests.sim.trace import Trace, brief, told
from tests.support.virtual_time import VirtualLoop

#: Without progress for so long, a reader gives its source up: short beside a lease, long beside a shard.
STALL_S = 3.0
#: Of the machine's steps one in so many, at least, is looked at.
CHECK_GAP_MAX = 24
#: Between two attempts to start a process whose seat is still taken, or that reaches no server.
RESTART_S = 1.0


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
        loop = asyncio.get_running_loop()
        self._began_s = loop.time()
        #: After how many steps the machine is checked; 0: drawn anew each time.
        self._check_every = check_every
        self._check_rng = random.Random(f"{seed} checks")
        self._epochs = random.Random(f"{seed} epochs")
        #: The server's lives, oldest first: the last that began, or outlived another, is the present one.
        self.lives = [self._begin_life()]
        #: What new connections of these places reach instead of the present life.
        self._led_astray: dict[str, Life] = {}
        #: Whether the server is being replaced, or there are two of them.
        self.server_in_trouble = False
        self.network = Network(self._host_for, random.Random(f"{seed} network"), self._tap)
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

    # ------------------------------------------------------------ the server

    @property
    def machine(self) -> Machine:
        """The machine of the server's present life; of its last one while there is none."""
        return self.lives[-1].machine

    async def restart_server(self, down_s: float) -> None:
        """The server is killed; `down_s` later an empty one serves under the same name."""
        self.server_in_trouble = True
        self.trace.add("SERVER", f"dies, for {down_s:.2f}s")
        self.checkers.lives.died()
        await self._kill_life(self.lives[-1])
        await asyncio.sleep(down_s)
        self.lives.append(self._begin_life())
        self.trace.add("SERVER", "lives again, empty")
        self.server_in_trouble = False

    async def split_server(self, places: Sequence[str], seconds: float, *, second_stays: bool) -> None:
        """These places are cut off and led to a second, empty server under the same name, while the first goes on to
        serve the others; then one of the two is gone, and everybody is led to the other."""
        self.server_in_trouble = True
        self.checkers.lives.split()
        first, second = self.lives[-1], self._begin_life()
        self.trace.add("SERVER", f"a second one takes {', '.join(places)} for {seconds:.2f}s")
        self.lives.insert(0, second)
        self._led_astray = dict.fromkeys(places, second)
        for process in [self.processes.get(name) for name in places]:
            if process is not None and not process.dead:
                self.network.cut(process, "its way leads to another server")
        await asyncio.sleep(seconds)
        self._led_astray = {}
        if second_stays:
            self.lives.remove(second)
            self.lives.append(second)
        self.trace.add("SERVER", f"the {'first' if second_stays else 'second'} is gone")
        await self._kill_life(first if second_stays else second)
        self.server_in_trouble = False

    async def end(self) -> None:
        """Stop the server, in all its lives."""
        for life in self.lives:
            await life.end("the world ends")

    def _begin_life(self) -> Life:
        return Life(self._epochs.randbytes(ID_BYTES), self._gap)

    async def _kill_life(self, life: Life) -> None:
        self.network.hang_up(life.host, "the server was killed")
        await life.end("killed")

    def _host_for(self, process: Process) -> Host:
        return self._led_astray.get(process.place.name, self.lives[-1]).host

    # ------------------------------------------------------------ what is said

    def _tap(self, process: Process, message: Request | Reply | Notice) -> None:
        if not isinstance(message, Beat | Ok | Progress | Hello):
            self.trace.add(process.name, f". {brief(message)}")
        self.checkers.heard(process, message)


def draw_places(rng: random.Random) -> list[Place]:
    """One trainer and some rollouts for each model, all of one job; of an even number of replicas two share a host."""
    models = 1 if rng.random() < 0.8 else 2
    places: list[Place] = []
    for m in range(models):
        model = ModelKey("job", ("actor", "draft")[m])
        shards = rng.choice([1, 1, 2, 3])
        layouts = [draw_layout(rng, m + 1, shard) for shard in range(shards)]
        replicas = ["trainer"] + [f"roll-{i}" for i in range(rng.randint(2, 4) if models == 1 else 2)]
        is_shared = len(replicas) % 2 == 0
        for number, replica in enumerate(replicas):
            spot, rack = rng.random() < 0.3, rng.randint(1, 2)
            for shard in range(shards):
                host = ("dc1", "r1", f"h{number // 2}") if is_shared else ("dc1", f"r{rack}", f"{replica}-{shard}")
                location = Location(host)
                seat = Seat(model, ReplicaId(replica), shard)
                places.append(Place(seat, shards, layouts[shard], replica == "trainer", spot, location))
    return places
