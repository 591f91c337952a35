"""Worlds without chance: one story each, of what the sweep once found. Small enough to follow in a debugger."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from tensorhub.errors import (
    Closed,
    GroupAborted,
    LeaseLost,
    OutcomeUnknown,
    TensorHubError,
    VersionUnavailable,
    WaitTimeout,
)
from tensorhub.messages import Abort, Done, Reply, Request
from tensorhub.types import Exactly, Latest, Location, ModelKey, ReplicaId, Seat
from tests.sim.content import draw_layout
from tests.sim.memory import Meddling, Rule
from tests.sim.process import Place, Process
from tests.sim.server import LEASE_S
from tests.sim.strands import run_stranded
from tests.sim.world import World

MODEL = ModelKey("job", "actor")
#: Some stories have links on which a chunk takes seconds.
STALL_S = 10.0


def place(replica: str, shard: int, shards: int) -> Place:
    layout = draw_layout(random.Random(shard), 1, shard)
    seat = Seat(MODEL, ReplicaId(replica), shard)
    return Place(seat, shards, layout, replica == "trainer", spot=False, location=Location(("dc1", "r1", replica)))


def told(shards: int, story: Callable[[World, list[Process], list[Process]], Awaitable[None]]) -> World:
    """Tell a story of a trainer and a rollout; nothing may be violated."""

    async def main() -> World:
        world = World(0, echo=False, stall_s=STALL_S)
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
        world.plane.rules.append(Rule(Meddling.DO_NOTHING, "rollout", 1.0, 0.0, weights_only=True))
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


def test_a_subset_whose_commit_was_unknown_is_no_version() -> None:
    """The answer to `Done` of a subset is lost. Asked again it was a success; but tensors of two versions are neither,
    and nobody is sent to them. (subset_selection_exact)"""

    async def story(world: World, trainer: list[Process], rollout: list[Process]) -> None:
        await publish(trainer, 1)
        (reader,) = rollout
        world.network.fragile.add(reader)
        only = sorted(reader.buffers.large)[:1]
        (got,) = await in_each(rollout, lambda process: process.replicate(Latest(), 1.0, only))
        assert isinstance(got, OutcomeUnknown)
        world.network.join(reader)
        (missing,) = await in_each(rollout, lambda process: process.replicate(Exactly(7), 1.0, None))
        assert isinstance(missing, TensorHubError)
        assert reader.version is None

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


async def reading(
    world: World, trainer: list[Process], rollout: list[Process]
) -> tuple[asyncio.Future[list[object]], asyncio.Future[list[object]]]:
    """Slow reads are under way, and the first reader's source waits for its end: that reader's replicate, and the
    unpublish. Whenever that returns, nobody reads there."""

    def is_read() -> bool:
        return any(read.source is trainer[0] for read in world.plane.reading.values())

    async def unpublish(process: Process) -> None:
        await process.unpublish(60.0, abandon=False)
        if is_read():
            world.checkers.violated("Drained", process, "it is still read")

    await publish(trainer, 1)
    world.plane.bytes_per_s = 0.02e6
    pull = asyncio.ensure_future(in_each(rollout[:1], lambda process: process.replicate(Latest(), 60.0, None)))
    siblings = [process.strand.spawn(process.replicate(Latest(), 60.0, None)) for process in rollout[1:]]
    asyncio.gather(*siblings, return_exceptions=True)
    await asyncio.sleep(0.5)
    assert is_read()
    drain = asyncio.ensure_future(in_each(trainer[:1], unpublish))
    await asyncio.sleep(0.1)
    return pull, drain


def test_an_aborted_reader_that_has_not_heard_of_it_is_waited_for() -> None:
    """A sibling dies; its news reaches the other shard late, which reads on meanwhile: the source's unpublish returns
    only after that. (sibling_dies)"""

    async def story(world: World, trainer: list[Process], rollout: list[Process]) -> None:
        pull, drain = await reading(world, trainer, rollout)
        world.network.part(rollout[0])
        await rollout[1].kill()
        await asyncio.sleep(4.0)
        assert world.machine.state.sessions[rollout[0].session.id].lingers
        assert not drain.done()
        world.network.join(rollout[0])
        assert await drain == [None]
        assert isinstance((await pull)[0], GroupAborted)

    told(2, story)


def test_a_reader_says_that_it_stopped_until_it_is_heard() -> None:
    """The word of an aborted reader is lost with its connection, after its call has returned: it is said again, and the
    source's unpublish does not wait for this shard's next replicate. (sibling_dies)"""

    async def story(world: World, trainer: list[Process], rollout: list[Process]) -> None:
        pull, drain = await reading(world, trainer, rollout)
        reader, ask = rollout[0], rollout[0].session.call

        async def fall_silent(request: Request, timeout_s: float) -> Reply:
            if isinstance(request, Abort):
                world.network.part(reader)
            return await ask(request, timeout_s)

        reader.session.call = fall_silent  # type: ignore[method-assign]
        await rollout[1].kill()
        assert isinstance((await pull)[0], GroupAborted)
        reader.session.call = ask  # type: ignore[method-assign]
        assert not drain.done()
        world.network.cut(reader, "lost")
        world.network.join(reader)
        async with asyncio.timeout(2.0):
            assert await drain == [None]
        assert reader.session.id in world.machine.state.sessions, "it was its word, not the end of its lease"

    told(2, story)


def test_a_reader_leaves_after_its_last_read() -> None:
    """A hub is closed while it replicates: its seat is given up, and so its source drained, when nothing is read any
    more."""

    async def story(world: World, trainer: list[Process], rollout: list[Process]) -> None:
        pull, drain = await reading(world, trainer, rollout)
        assert await in_each(rollout, lambda process: process.member.close(30.0)) == [None]
        assert isinstance((await pull)[0], Closed)
        assert await drain == [None]

    told(1, story)


def test_a_reader_that_was_forgotten_stops() -> None:
    """A reader is out of its server's reach for longer than its lease, while its reads go on: as soon as it hears that
    it was forgotten, it reads no more, and says why. (source_stopped)"""

    async def story(world: World, trainer: list[Process], rollout: list[Process]) -> None:
        await publish(trainer, 1)
        world.plane.bytes_per_s = 0.02e6
        pull = asyncio.ensure_future(in_each(rollout, lambda process: process.replicate(Latest(), 60.0, None)))
        await asyncio.sleep(0.5)
        world.network.part(rollout[0])
        await asyncio.sleep(LEASE_S + 1.0)
        assert world.plane.reading
        assert rollout[0].session.id not in world.machine.state.sessions
        world.network.join(rollout[0])
        await asyncio.sleep(2.0)
        assert not world.plane.reading
        assert [type(outcome) for outcome in await pull] == [LeaseLost]

    told(1, story)


def test_a_world_whose_server_came_back_empty_works_again() -> None:
    """A server dies and another begins, empty, under the same name: what everybody holds is known again, others get it,
    and the next version goes round. Its epoch is another."""

    async def story(world: World, trainer: list[Process], rollout: list[Process]) -> None:
        await publish(trainer, 1)
        before = world.machine.state.epoch
        await world.restart_server(1.0)
        assert world.machine.state.epoch != before
        await in_each(rollout, lambda process: process.replicate(Latest(), 20.0, None))
        assert [process.version for process in rollout] == [1]
        assert await in_each(trainer, lambda process: process.unpublish(20.0, abandon=False)) == [None]
        await publish(trainer, 2)
        await in_each(rollout, lambda process: process.replicate(Latest(), 20.0, None))
        assert [process.version for process in rollout] == [2]

    told(1, story)


@pytest.mark.parametrize("second_stays", [False, True])
def test_a_world_that_had_two_servers_works_again(second_stays: bool) -> None:
    """For a while a second, empty server answers the rollout under the same name; then one of the two is gone: all meet
    at the other."""

    async def story(world: World, trainer: list[Process], rollout: list[Process]) -> None:
        await publish(trainer, 1)
        taken = [process.place.name for process in rollout]
        await world.split_server(taken, 3.0, second_stays=second_stays)
        await in_each(rollout, lambda process: process.replicate(Latest(), 20.0, None))
        assert [process.version for process in rollout] == [1]

    told(1, story)
