"""Worlds without chance: one story each, of what the sweep once found. Small enough to follow in a debugger."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from tensorhub.errors import OutcomeUnknown, TensorHubError, VersionUnavailable, WaitTimeout
from tensorhub.messages import Done, Reply, Request
from tensorhub.types import Latest, Location, ModelKey, ReplicaId, Seat
from tests.sim.content import draw_layout
from tests.sim.memory import Meddling, Rule
from tests.sim.process import Place, Process
from tests.sim.strands import run_stranded
from tests.sim.world import World

MODEL = ModelKey("job", "actor")


def place(replica: str, shard: int, shards: int) -> Place:
    layout = draw_layout(random.Random(shard), 1, shard)
    seat = Seat(MODEL, ReplicaId(replica), shard)
    return Place(seat, shards, layout, replica == "trainer", spot=False, location=Location(("dc1", "r1", replica)))


def told(shards: int, story: Callable[[World, list[Process], list[Process]], Awaitable[None]]) -> World:
    """Tell a story of a trainer and a rollout; nothing may be violated."""

    async def main() -> World:
        world = World(0, echo=False)
        world.places = [place(replica, shard, shards) for replica in ("trainer", "rollout") for shard in range(shards)]
        trainer, rollout = await world.living(world.places[:shards]), await world.living(world.places[shards:])
        await story(world, trainer, rollout)
        for process in [*trainer, *rollout]:
            await process.kill()
        await world.end()
        assert world.checkers.violations == []
        return world

    world: World = run_stranded(main())
    return world


async def in_each(processes: list[Process], work: Callable[[Process], Awaitable[object]]) -> list[object]:
    """Every process does it at once; what each returned or raised."""

    async def one(process: Process) -> object:
        try:
            return await work(process)
        except TensorHubError as error:
            return error

    return list(await asyncio.gather(*(process.strand.spawn(one(process)) for process in processes)))


async def publish(processes: list[Process], version: int) -> None:
    async def work(process: Process) -> None:
        await process.write(version)
        await process.publish(version, "now", 5.0)

    assert await in_each(processes, work) == [None] * len(processes)


def test_a_shard_that_missed_a_transaction_is_back_in_step() -> None:
    """One shard's user is busy, the other's replicate times out: the next replicate of both works at once.
    (one_version_per_replica)"""

    async def story(world: World, trainer: list[Process], rollout: list[Process]) -> None:
        await publish(trainer, 1)
        (alone,) = await in_each(rollout[:1], lambda process: process.replicate(Latest(), 1.0, None))
        assert isinstance(alone, WaitTimeout)
        await in_each(rollout, lambda process: process.replicate(Latest(), 5.0, None))
        assert [process.version for process in rollout] == [1, 1]

    told(2, story)


def test_an_engine_that_does_nothing_finds_no_old_digests() -> None:
    """Memory and digests of version 1 are still there when an engine reports version 2 without moving a byte: not a
    chunk of it counts, and nothing of it is shown to others. (transport_lies, relay_does_not_propagate_corruption)"""

    async def story(world: World, trainer: list[Process], rollout: list[Process]) -> None:
        await publish(trainer, 1)
        await in_each(rollout, lambda process: process.replicate(Latest(), 5.0, None))
        await in_each(trainer, lambda process: process.unpublish(5.0, abandon=False))
        await publish(trainer, 2)
        rule = Rule(Meddling.DO_NOTHING, "rollout", 1.0, 0.0)
        # The header and the map are read truthfully, within the first milliseconds.
        asyncio.get_running_loop().call_later(0.003, world.plane.rules.append, rule)
        (got,) = await in_each(rollout, lambda process: process.replicate(Latest(), 3.0, None))
        assert isinstance(got, VersionUnavailable)
        assert "does not match its digest" in got.message
        assert rollout[0].version is None
        world.plane.rules.clear()
        await in_each(rollout, lambda process: process.replicate(Latest(), 5.0, None))
        assert rollout[0].version == 2

    told(1, story)


def test_a_lost_commit_is_unknown_until_asked_again() -> None:
    """The answer to `Done` does not come in time: `OutcomeUnknown`, not a mere timeout; the next replicate learns that
    it was a success and moves no byte."""

    async def story(world: World, trainer: list[Process], rollout: list[Process]) -> None:
        await publish(trainer, 1)
        (reader,) = rollout

        ask = reader.session.call

        async def fall_silent(request: Request, timeout_s: float) -> Reply:
            """The question is on its way, and no answer comes."""
            if isinstance(request, Done):
                world.network.part(reader)
            return await ask(request, timeout_s)

        reader.session.call = fall_silent  # type: ignore[method-assign]
        (got,) = await in_each(rollout, lambda process: process.replicate(Latest(), 1.0, None))
        reader.session.call = ask  # type: ignore[method-assign]
        assert isinstance(got, OutcomeUnknown)
        assert reader.version is None
        world.network.join(reader)
        (again,) = await in_each(rollout, lambda process: process.replicate(Latest(), 10.0, None))
        assert not isinstance(again, TensorHubError), again
        assert reader.version == 1

    told(1, story)


def test_an_abandoning_unpublish_does_not_wait_for_the_seal() -> None:
    """The server cannot be reached while a publication's digests are to be reported: taking the buffers back waits for
    its own question to the server, not for that one."""

    async def story(world: World, trainer: list[Process], rollout: list[Process]) -> None:
        (publisher,) = trainer

        async def work(process: Process) -> None:
            await process.write(1)
            await process.publish(1, "background", 60.0)
            world.network.part(process)
            await asyncio.sleep(2.0)
            began_s = world.now_s()
            await process.unpublish(1.0, abandon=True)
            assert world.now_s() - began_s <= 1.5

        assert await in_each(trainer, work) == [None]
        world.network.join(publisher)

    told(1, story)


def test_a_seal_of_what_the_server_dropped_is_no_accident() -> None:
    """The buffers are taken back while the digests are on their way to the server: its refusal concerns nobody."""

    async def story(world: World, trainer: list[Process], rollout: list[Process]) -> None:
        async def work(process: Process) -> None:
            for version in range(1, 40):
                await process.write(version)
                await process.publish(version, "background", 5.0)
                await asyncio.sleep(process.rng.uniform(0, 0.02))
                await process.unpublish(5.0, abandon=True)

        assert await in_each(trainer, work) == [None]

    told(1, story)
