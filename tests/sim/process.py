"""One simulated process: a real session and a real member on simulated memory, which can be killed and stopped.

It decides nothing. Each operation runs in the process's own strand and is judged there, the instant it returned or
raised, before anything else can happen to the tensors.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tensorhub.client.member import Member
from tensorhub.client.results import Replication
from tensorhub.client.session import Session
from tensorhub.client.slot import State
from tensorhub.types import DEFAULT_LINEAGE, ID_BYTES, Location, Seat, Selector, SessionId
from tests.sim.content import SPOILED, SimBuffers
from tests.sim.memory import SimEngine
from tests.sim.network import SimLink
from tests.sim.strands import Strand

if TYPE_CHECKING:
    from tests.sim.content import Layout
    from tests.sim.world import World

T = TypeVar("T")

OPEN_S = 10.0
BUFFERS = "a"


@dataclass(frozen=True, slots=True)
class Place:
    """A seat of the cluster, whoever sits there."""

    seat: Seat
    shards: int
    layout: Layout
    is_trainer: bool
    spot: bool
    location: Location

    @property
    def name(self) -> str:
        return f"{self.seat.model.name[0]}.{self.seat}"


class InlineOffload:
    """Blocking work where it stands, but not at once: a busy machine starts it late and is late to say so."""

    def __init__(self, rng: random.Random, lateness_s: float) -> None:
        self._rng = rng
        self._lateness_s = lateness_s

    async def run(self, work: Callable[[], T]) -> T:
        await asyncio.sleep(self._rng.random() * self._lateness_s)
        result = work()
        await asyncio.sleep(self._rng.random() * self._lateness_s)
        return result


class Process:
    """One life of a process in a place."""

    def __init__(self, world: World, place: Place, life: int) -> None:
        self.world = world
        self.place = place
        self.seat = place.seat
        self.name = f"{place.name}~{life}"
        self.dead = False
        self.started = False
        #: It was declared dead and somebody else sits in its place.
        self.replaced = False
        self.strand, self.heart = Strand(self.name), Strand(f"{self.name} heart")
        self.rng = random.Random(f"{world.seed} {self.name}")
        self.engine = SimEngine(world.plane, self)
        self.buffers = SimBuffers(place.layout, self.rng, BUFFERS)
        link = SimLink(world.network, self)
        self.session = Session(link, SessionId(self.rng.randbytes(ID_BYTES)), host=place.name, pid=life)
        self.member = Member(
            self.session,
            [self.engine],
            InlineOffload(self.rng, 0.002),
            InlineOffload(self.rng, world.digest_lateness_s),
            self.seat,
            place.shards,
            "flat",
            DEFAULT_LINEAGE,
            place.spot,
            place.location,
            lambda: self.rng.randbytes(ID_BYTES),
            world.stall_s,
        )

    # ------------------------------------------------------------ what a user sees

    @property
    def version(self) -> int | None:
        """`hub.version`."""
        slot = self.member.slots.get(BUFFERS)
        return None if slot is None or slot.version is None else slot.version.number

    @property
    def state(self) -> State:
        """`hub.status()`, in a word."""
        slot = self.member.slots.get(BUFFERS)
        return State.EMPTY if slot is None else slot.state

    @property
    def is_filling(self) -> bool:
        return self.state is State.FILLING

    @property
    def is_usable(self) -> bool:
        """Whether its user can go on with it: started, not closed, its seat not lost."""
        return bool(self.member.slots) and not self.dead and not self.member.closed and self.member.lost is None

    @property
    def lease_is_live(self) -> bool:
        """Whether the server must still think of it, as far as it knows itself."""
        return not (self.dead or self.strand.frozen or self.session.fenced())

    # ------------------------------------------------------------ what a user does

    async def start(self) -> None:
        """Open, join, register."""
        self.started = True
        await self.session.open(OPEN_S)
        await self.member.join(OPEN_S)
        self.member.register(self.buffers)

    async def write(self, version: int) -> None:
        """A step of the optimizer: all tensors, one after another."""
        for row in self.buffers.rows():
            self.buffers.write(row, version)
            await asyncio.sleep(self.rng.random() * 0.01)

    def scribble(self, version: int) -> None:
        """Break the contract: write to one tensor of what is published."""
        self.buffers.write(self.rng.choice(self.buffers.rows()), version | SPOILED)

    async def publish(self, version: int, digest: str, timeout_s: float) -> None:
        await self.member.publish(version, BUFFERS, digest, timeout_s)

    async def unpublish(self, timeout_s: float, *, abandon: bool) -> None:
        await self.member.unpublish(BUFFERS, timeout_s, abandon=abandon)

    async def replicate(self, selector: Selector, timeout_s: float, only: Sequence[str] | None) -> Replication:
        return await self.member.replicate(selector, BUFFERS, timeout_s, only)

    async def stop(self) -> None:
        """Close hub and session, as a process that ends well."""
        await self.member.close(OPEN_S)
        await self.session.close(OPEN_S)
        await self.engine.close()

    # ------------------------------------------------------------ what is done to it

    async def kill(self) -> None:
        """At once: its memory is gone, its connections break, nothing of it runs any more."""
        self.dead = True
        await self.engine.close()
        self.world.network.join(self)
        self.world.network.cut(self, "its process is dead")
        for strand in (self.heart, self.strand):
            strand.thaw()
            strand.cancel()
        # What it had open does not reconnect.
        closing = self.strand.spawn(self.session.close(0.0))
        await asyncio.wait([closing])

    def freeze(self, *, heart: bool) -> None:
        """Stop the interpreter; with `heart` also the thread that beats."""
        self.strand.freeze()
        if heart:
            self.heart.freeze()

    def thaw(self) -> None:
        self.heart.thaw()
        self.strand.thaw()
