"""The operations of a hub, each ready to be run once in a small world of a trainer and three rollouts.

Each says which process is the victim, what has happened before, what it does, and what others do meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial

from tensorhub import messages as m
from tensorhub.client.margins import NS
from tensorhub.errors import TensorHubError
from tensorhub.types import AtLeast, Latest
from tests.sim.memory import Meddling, Rule
from tests.sim.process import Process
from tests.sim.world import World

#: Deadline of everything that is run here: nothing needs a tenth of it.
CALL_S = 20.0
#: Seats: two shards of the last one's replica, so that groups are met, too.
TRAINER, READER, RELAY, LATE = range(4)


@dataclass(eq=False)
class Stage:
    """A world with its processes, by seat."""

    world: World
    cast: list[Process]
    #: What goes on beside the operation.
    beside: list[asyncio.Task[object]] = field(default_factory=list)
    context: Context = field(default_factory=copy_context)

    async def do(self, process: Process, work: Awaitable[object]) -> object:
        """In the process's own strand; its result, or its error."""
        return (await asyncio.gather(process.strand.spawn(_awaited(work)), return_exceptions=True))[0]

    async def must(self, process: Process, work: Awaitable[object]) -> object:
        """The same, and it must succeed."""
        outcome = await self.do(process, work)
        if isinstance(outcome, BaseException):
            raise AssertionError(f"{process.name} could not do what must be possible: {outcome!r}") from outcome
        return outcome

    def meanwhile(self, process: Process, work: Awaitable[object]) -> None:
        self.beside.append(asyncio.ensure_future(self.do(process, work)))

    def soon_publish(self, version: int) -> None:
        """While the operation waits; in the context of the world, not of the process that asks for it."""
        work = partial(self.meanwhile, self.cast[TRAINER])
        asyncio.get_running_loop().call_later(0.2, lambda: work(self.publish(version)), context=self.context)

    async def publish(self, version: int, digest: str = "now") -> None:
        trainer = self.cast[TRAINER]
        await self.must(trainer, trainer.write(version))
        await self.must(trainer, trainer.publish(version, digest, CALL_S))


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of one process."""

    name: str
    victim: int
    act: Callable[[Stage, Process], Awaitable[object]]
    prepare: Callable[[Stage], Awaitable[None]]
    #: The victim has not been started before.
    is_first: bool = False


async def _awaited(work: Awaitable[object]) -> object:
    return await work


async def nothing(stage: Stage) -> None:
    """Everybody is there; nobody holds anything."""


async def written(stage: Stage) -> None:
    """The trainer's tensors hold version 1."""
    await stage.must(stage.cast[TRAINER], stage.cast[TRAINER].write(1))


async def published(stage: Stage) -> None:
    await stage.publish(1)


async def being_digested(stage: Stage) -> None:
    await stage.publish(1, "background")


async def held(stage: Stage) -> None:
    """The trainer and the reader hold version 1."""
    await stage.publish(1)
    await stage.must(stage.cast[READER], stage.cast[READER].replicate(Latest(), CALL_S, None))


async def overtaken(stage: Stage) -> None:
    """The reader holds version 1, the relay reads from it, and version 2 is out."""
    await held(stage)
    trainer, relay = stage.cast[TRAINER], stage.cast[RELAY]
    await stage.must(trainer, trainer.unpublish(CALL_S, abandon=False))
    stage.world.plane.bytes_per_s = 0.4e6
    stage.meanwhile(relay, relay.replicate(Latest(), CALL_S, None))
    await asyncio.sleep(0.1)
    await stage.publish(2)


async def read_by_another(stage: Stage) -> None:
    """The trainer's version 1 is being read."""
    stage.world.plane.bytes_per_s = 0.4e6
    await stage.publish(1)
    stage.meanwhile(stage.cast[RELAY], stage.cast[RELAY].replicate(Latest(), CALL_S, None))
    await asyncio.sleep(0.1)


async def two_sources(stage: Stage) -> None:
    """The trainer and the relay hold version 1; whatever comes from the relay is spoiled after a while."""
    await stage.publish(1)
    await stage.must(stage.cast[RELAY], stage.cast[RELAY].replicate(Latest(), CALL_S, None))
    rule = Rule(Meddling.FAIL, "reader", 1.0, 0.0, source="relay")
    asyncio.get_running_loop().call_later(0.03, stage.world.plane.rules.append, rule)


async def start(stage: Stage, victim: Process) -> None:
    await victim.start()


def publish(digest: str) -> Callable[[Stage, Process], Awaitable[None]]:
    async def act(stage: Stage, victim: Process) -> None:
        await victim.publish(1, digest, CALL_S)
        await asyncio.sleep(0.5)  # the digests

    return act


async def unpublish(stage: Stage, victim: Process) -> None:
    await victim.unpublish(CALL_S, abandon=False)


async def abandon(stage: Stage, victim: Process) -> None:
    await victim.unpublish(CALL_S, abandon=True)


async def replicate(stage: Stage, victim: Process) -> None:
    await victim.replicate(Latest(), CALL_S, None)


async def replicate_some(stage: Stage, victim: Process) -> None:
    await victim.replicate(Latest(), CALL_S, victim.buffers.large[:1])


async def replicate_early(stage: Stage, victim: Process) -> None:
    """Before there is a version."""
    stage.soon_publish(3)
    await victim.replicate(AtLeast(3), CALL_S, None)


async def suspend(stage: Stage, victim: Process) -> None:
    await victim.member.suspend(CALL_S)


async def suspend_and_resume(stage: Stage, victim: Process) -> None:
    await victim.member.suspend(CALL_S)
    victim.member.resume([victim.buffers])


async def register_again(stage: Stage, victim: Process) -> None:
    victim.member.register(victim.buffers)


async def close(stage: Stage, victim: Process) -> None:
    await victim.member.close(CALL_S)


async def end(stage: Stage, victim: Process) -> None:
    await victim.stop()


async def wait(stage: Stage, victim: Process) -> None:
    stage.soon_publish(3)
    await victim.session.call(m.Wait(victim.seat.model, AtLeast(3), victim.place.location, int(CALL_S * NS)), CALL_S)


async def watch(stage: Stage, victim: Process) -> None:
    stage.soon_publish(3)
    with suppress(TimeoutError):  # what happens while the server is away is missed
        async with asyncio.timeout(CALL_S), aclosing(victim.session.watch(victim.seat.model)) as events:
            async for event in events:
                if event.kind == "sealed":
                    return


async def lose_and_return(stage: Stage, victim: Process) -> None:
    """The connection is lost while a version is pulled; session, claims and calls come back."""
    asyncio.get_running_loop().call_later(0.02, stage.world.network.cut, victim, "lost")
    with suppress(TensorHubError):
        await victim.replicate(Latest(), CALL_S, None)


OPERATIONS = (
    Operation("start", LATE, start, nothing, is_first=True),
    Operation("publish background", TRAINER, publish("background"), written),
    Operation("publish now", TRAINER, publish("now"), written),
    Operation("publish off", TRAINER, publish("off"), written),
    Operation("unpublish", TRAINER, unpublish, published),
    Operation("unpublish undigested", TRAINER, unpublish, being_digested),
    Operation("unpublish drains", TRAINER, unpublish, read_by_another),
    Operation("unpublish abandons", TRAINER, abandon, read_by_another),
    Operation("replicate", READER, replicate, published),
    Operation("replicate undigested", READER, replicate, being_digested),
    Operation("replicate over a version", READER, replicate, overtaken),
    Operation("replicate some", READER, replicate_some, published),
    Operation("replicate some over a version", READER, replicate_some, overtaken),
    Operation("replicate re-routed", READER, replicate, two_sources),
    Operation("replicate before it is out", READER, replicate_early, nothing),
    Operation("replicate what is held", READER, replicate, held),
    Operation("replicate through a loss", READER, lose_and_return, published),
    Operation("suspend", READER, suspend, held),
    Operation("suspend and resume", TRAINER, suspend_and_resume, published),
    Operation("suspend while read", TRAINER, suspend, read_by_another),
    Operation("register again", TRAINER, register_again, nothing),
    Operation("close", READER, close, held),
    Operation("close while read", TRAINER, close, read_by_another),
    Operation("end", READER, end, held),
    Operation("wait", READER, wait, nothing),
    Operation("watch", READER, watch, nothing),
)
