"""A crowd: hundreds of readers of one version, who come within seconds and relay it to each other.

It decides who there is and how they ask; what goes wrong, `chaos.py` says. Shards are tiny and have many chunks, so
that a chain is as long in chunks as a real one; links are per host, so that there are stragglers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

from tensorhub.client import publication
from tensorhub.client.results import Replication
from tensorhub.errors import TensorHubError
from tensorhub.pipeline import manifest
from tensorhub.types import Latest, Location, ModelKey, ReplicaId, Seat
from tests.sim.content import WORD, Layout
from tests.sim.memory import Link
from tests.sim.process import BUFFERS, Place, Process
from tests.sim.watch import Watch
from tests.sim.workload import Trainer
from tests.sim.world import World

MODEL = ModelKey("job", "actor")
#: 12 chunks of a large tensor, and one of tiny ones.
SHARD = Layout(1, 0, (("w", 48 << 10), ("bias", 64 * WORD), ("empty", 0)))
CHUNK_BYTES = 4 << 10
STREAM_BYTES = SHARD.manifest().stream_bytes
SHARD_CHUNKS = 13
#: A shard takes a tenth of a second over a host's link.
LINK_BYTES_PER_S = 0.5e6
#: Where no link limits it, a wire does.
WIRE_BYTES_PER_S = 4e6
STALL_S = 2.0
#: The machine's invariants look at everything, a crowd makes thousands of steps.
CHECK_EVERY = 61
REPLICATE_S = 30.0


@contextmanager
def scaled() -> Iterator[None]:
    """Chunks and first batches scaled to simulated shards, as a real shard's are to it."""
    chunk_size, first = manifest.chunk_size, publication.FIRST_BATCH_BYTES
    manifest.chunk_size, publication.FIRST_BATCH_BYTES = lambda stream_bytes: CHUNK_BYTES, CHUNK_BYTES
    try:
        yield
    finally:
        manifest.chunk_size, publication.FIRST_BATCH_BYTES = chunk_size, first


def place(replica: str) -> Place:
    """The one shard of a replica, on a host of its own."""
    seat = Seat(MODEL, ReplicaId(replica), 0)
    return Place(seat, 1, SHARD, replica.startswith("trainer"), spot=False, location=Location(("dc1", "r1", replica)))


class Crowd:
    """A trainer, perhaps others that publish the same, and readers; each reader a task that ends with its version."""

    def __init__(self, world: World, readers: Sequence[str], *, link_bytes_per_s: float = LINK_BYTES_PER_S) -> None:
        self.world = world
        world.plane.bytes_per_s = WIRE_BYTES_PER_S
        self.trainer = place("trainer")
        self.readers = [place(name) for name in readers]
        world.places = [self.trainer, *self.readers]
        for each in world.places:
            world.plane.links[each.seat.replica] = Link(link_bytes_per_s)
        self.watch = Watch(world, place("observer"))
        #: {replica: its last successful replicate, and when that returned}.
        self.got: dict[str, tuple[Replication, float]] = {}
        self.failed: dict[str, TensorHubError] = {}

    def process(self, replica: str) -> Process:
        """Who sits there now."""
        return self.world.processes[place(replica).name]

    async def publish(self, version: int = 1) -> Trainer:
        """Have the trainer publish, every digest there at once."""
        trainer = Trainer(self.world, [self.trainer])
        trainer.version = version - 1
        assert await trainer.step(await self.world.living([self.trainer]), "now")
        return trainer

    async def read(self, replica: str, timeout_s: float = REPLICATE_S) -> Replication | TensorHubError:
        """One replicate of the latest version by one reader, judged by the checkers when it returns."""
        (process,) = await self.world.living([next(p for p in self.readers if p.seat.replica == replica)])
        checkers, now_s = self.world.checkers, self.world.now_s

        async def work() -> Replication:
            before = checkers.before(process)
            try:
                got = await process.replicate(Latest(), timeout_s, None)
            except TensorHubError as error:
                checkers.failed(process, before, error)
                raise
            checkers.replicated(process, before, got, None)
            self.got[replica] = got, now_s()
            return got

        outcome = await self.world.perform(process, f"replicate ({timeout_s:g}s)", work, timeout_s)
        if outcome.error is not None:
            self.failed[replica] = outcome.error
            return outcome.error
        result: Replication = outcome.value
        return result

    def watermark(self, replica: str) -> int:
        """Chunks that a replica shows of what it is filled with."""
        process = self.world.processes.get(place(replica).name)
        slot = None if process is None else process.member.slots.get(BUFFERS)
        return 0 if slot is None else slot.holding.watermark


@asynccontextmanager
async def gathered(
    seed: int, readers: Sequence[str], *, check_every: int = CHECK_EVERY, judged: bool = True
) -> AsyncIterator[Crowd]:
    """A crowd whose graph is watched; at the end all are killed, and nothing may have been violated. Not `judged`, it
    says only what was found: for stories with mistakes in them."""
    world = World(seed, echo=False, check_every=check_every, stall_s=STALL_S)
    crowd = Crowd(world, readers)
    watching = asyncio.create_task(crowd.watch.run())
    try:
        yield crowd
        if judged:
            world.machine.check()
        if watching.done():
            watching.result()
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        for process in [*world.processes.values(), *world.replaced]:
            if not process.dead:
                await process.kill()
        await world.end()
    world.checkers.crashed([])
    assert not judged or not world.checkers.violations, "\n".join(world.checkers.violations[:20])
