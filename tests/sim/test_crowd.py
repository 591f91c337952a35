"""Crowds: chains of relays and hundreds of readers, some of which lie, stall, crawl, stop or die."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

import pytest

from tensorhub.client.results import Replication
from tensorhub.errors import TensorHubError, VersionUnavailable
from tensorhub.server.settings import READERS_PER_SOURCE_MAX, SICK_REPORTS
from tests.sim import chaos
from tests.sim import crowd as crowds
from tests.sim.crowd import CHUNK_BYTES, STALL_S, Crowd, gathered
from tests.sim.memory import Meddling, Rule
from tests.sim.strands import run_stranded

pytestmark = pytest.mark.slow

Outcome = Replication | TensorHubError
CHUNKS = crowds.SHARD_CHUNKS


def told(readers: Sequence[str], story: Callable[[Crowd], Awaitable[None]], seed: int = 0) -> None:
    """Tell a story of a trainer and these readers; nothing may be violated, no graph may close, no watermark fall."""

    async def main() -> None:
        async with gathered(seed, readers) as crowd:
            await crowd.publish()
            await story(crowd)

    with crowds.scaled():
        run_stranded(main())


async def chained(crowd: Crowd, names: Sequence[str]) -> list[asyncio.Task[Outcome]]:
    """Readers that ask one after the other, each when the one before it shows what it has verified."""
    tasks: list[asyncio.Task[Outcome]] = []
    for name in names:
        tasks.append(asyncio.create_task(crowd.read(name)))
        await reached(crowd, name, 1)
    return tasks


async def reached(crowd: Crowd, name: str, watermark: int) -> None:
    """Wait until a reader shows so many chunks; far longer than any takes."""
    async with asyncio.timeout(crowds.REPLICATE_S):
        while crowd.watermark(name) < watermark:
            await asyncio.sleep(0.001)


async def ended(tasks: Sequence[asyncio.Task[Outcome]]) -> None:
    """All of them, well."""
    got = await asyncio.gather(*tasks)
    assert [each for each in got if isinstance(each, TensorHubError)] == []


def lies(source: str) -> Rule:
    """From now on its weights reach all its readers wrong."""
    return Rule(Meddling.FLIP, "", 1.0, 0.0, source=source, weights_only=True)


CHAIN = ("r1", "r2", "r3", "r4", "r5")


@pytest.mark.parametrize("liar", CHAIN[:-1])
def test_a_lying_relay_in_mid_chain(liar: str) -> None:
    """relay_does_not_propagate_corruption, transport_lies: a relay begins to serve wrong bytes when its reader has a
    quarter. That reader alone notices and goes elsewhere; all end with the right bytes, and only the liar is blamed."""

    async def story(crowd: Crowd) -> None:
        tasks = await chained(crowd, CHAIN)
        victim = CHAIN[CHAIN.index(liar) + 1]
        crowd.world.plane.rules.append(lies(liar))
        await ended(tasks)
        assert crowd.watch.depth >= 3
        assert {(report.reader, report.source) for report in crowd.watch.reports} == {(victim, liar)}
        assert all("wrong bytes" in report.reason for report in crowd.watch.reports)
        assert {name for name in CHAIN if len(crowd.watch.granted(name)) > 1} == {victim}

    told(CHAIN, story)


def test_a_relay_whose_memory_changes_after_it_was_verified() -> None:
    """relay_does_not_propagate_corruption: one bit of a complete relay's memory flips. Its next reader refuses that
    chunk and goes on elsewhere; the chain behind that reader never sees it."""

    async def story(crowd: Crowd) -> None:
        await ended([asyncio.create_task(crowd.read("r1"))])
        crowd.process("r1").buffers.flip_bit()
        await ended(await chained(crowd, CHAIN[1:]))
        assert crowd.watch.granted("r2")[0] == "r1"
        assert [(report.reader, report.source) for report in crowd.watch.reports] == [("r2", "r1")]

    told(CHAIN, story)


async def lose_first(crowd: Crowd, how: str) -> None:
    """The first relay of a chain dies, or stands still, when it is half done. The others end well; then it goes on."""
    tasks = await chained(crowd, CHAIN)
    lost = crowd.process("r1")
    await reached(crowd, "r1", CHUNKS // 2)
    began_s = crowd.world.now_s()
    if how == "killed":
        await lost.kill()
    else:
        lost.freeze(heart=True)
    await ended(tasks[1:])
    assert crowd.world.now_s() - began_s < 5 * STALL_S
    lost.thaw()
    await tasks[0]


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_source_lost_in_mid_chain(how: str) -> None:
    """source_killed_midchunk, source_stopped: the first relay of a chain dies, or stands still, half done. The others
    complete soon after it is noticed, and read at most two chunks again."""

    async def story(crowd: Crowd) -> None:
        await lose_first(crowd, how)
        assert crowd.watch.depth >= 3
        assert "r1" in crowd.watch.blamed()
        for name in CHAIN[1:]:
            again = crowd.world.plane.asked[crowd.process(name)] - crowds.STREAM_BYTES - 8 * CHUNKS
            assert again <= 2 * (CHUNK_BYTES + 8), (name, again)

    told(CHAIN, story)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_only_the_lost_source_is_blamed(how: str) -> None:
    """source_killed_midchunk, source_stopped: behind the lost relay everybody is well, and keeps its source: the chain
    goes on as one once its first reader has another source."""

    async def story(crowd: Crowd) -> None:
        await lose_first(crowd, how)
        assert crowd.watch.blamed() == {"r1"}
        assert {name for name in CHAIN if len(crowd.watch.granted(name)) > 1} == {"r2"}

    told(CHAIN, story)


def test_readers_behind_a_straggler() -> None:
    """The second of a chain has a quarter of the others' link. It gets everything, at its own pace; those that came
    after it are done about when the first is, not when it is."""

    async def story(crowd: Crowd) -> None:
        shard_s = 2.0  # long beside the reports by which the server knows a straggler
        for link in crowd.world.plane.links.values():
            link.bytes_per_s = crowds.STREAM_BYTES / shard_s
        crowd.world.plane.links["r2"].bytes_per_s /= 4
        await ended(await chained(crowd, CHAIN))
        late_s = {name: returned_s - crowd.got["r1"][1] for name, (_, returned_s) in crowd.got.items()}
        assert late_s["r2"] > 2 * shard_s
        assert max(late_s[name] for name in ("r3", "r4", "r5")) < shard_s, late_s

    told(CHAIN, story)


@pytest.mark.parametrize("readers", [2, 12])
@pytest.mark.parametrize("standby", [True, False], ids=["another", "no other"])
def test_partials_that_lose_their_source(readers: int, standby: bool) -> None:
    """source_killed_midchunk: partial sources lose the complete one they all hang on. With another one all complete;
    with none all end by name, soon, and nobody waits for somebody who waits."""
    names = [f"r{i}" for i in range(1, readers + 1)]

    async def story(crowd: Crowd) -> None:
        if standby:
            await ended([asyncio.create_task(crowd.read("standby"))])
        tasks = await chained(crowd, names)
        lost = "standby" if standby else "trainer"
        await crowd.process(lost).kill()
        began_s = crowd.world.now_s()
        got = await asyncio.gather(*tasks)
        if standby:
            assert [each for each in got if isinstance(each, TensorHubError)] == []
        else:
            assert all(isinstance(each, VersionUnavailable) for each in got), got
            assert all("version 1" in str(each) for each in got)
        assert crowd.world.now_s() - began_s < 3 * STALL_S

    told([*names, "standby"], story)


def test_a_sick_source_in_the_crowd() -> None:
    """sick_source_quarantined: a complete copy whose bytes never arrive right is given to the few that ask at once,
    and after their reports to nobody; the crowd completes from the others."""
    names = [f"r{i}" for i in range(40)]

    async def story(crowd: Crowd) -> None:
        await ended([asyncio.create_task(crowd.read("sick"))])
        crowd.world.plane.rules.append(lies("sick"))
        coming = []
        for name in names:
            coming.append(asyncio.create_task(crowd.read(name)))
            await asyncio.sleep(0.02)
        await ended(coming)
        given = [reader for reader, source in crowd.watch.grants if source == "sick"]
        assert SICK_REPORTS <= len(given) <= READERS_PER_SOURCE_MAX
        assert crowd.watch.blamed() == {"sick"}

    told([*names, "sick"], story)


def test_a_sick_reader_in_the_crowd() -> None:
    """sick_source_quarantined: a reader to whom all bytes arrive wrong blames whoever it is given, and fails alone:
    whom it blamed serves the next ones."""

    async def story(crowd: Crowd) -> None:
        await ended([asyncio.create_task(crowd.read("r0"))])
        crowd.world.plane.rules.append(Rule(Meddling.FLIP, "sick", 1.0, 0.0, weights_only=True))
        assert isinstance(await crowd.read("sick"), VersionUnavailable)
        assert crowd.watch.blamed() == {"r0", "trainer"}
        await ended([asyncio.create_task(crowd.read(f"r{i}")) for i in range(1, 9)])
        assert "r0" in {source for reader, source in crowd.watch.grants if reader != "sick"}
        assert {report.reader for report in crowd.watch.reports} == {"sick"}

    told([*(f"r{i}" for i in range(9)), "sick"], story)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("seed", "readers"), [(0, 202), (1, 60)])
def test_a_crowd_in_chaos(seed: int, readers: int) -> None:
    """source_killed_midchunk, source_stopped, transport_lies, sick_source_quarantined: of hundreds of readers some are
    killed and start anew, stand still, lie, are lied to, wait in vain, crawl. All get the right bytes in the end; no
    source is its own, no watermark falls; and once all is well the next version reaches everybody at once."""

    async def story(crowd: Crowd) -> None:
        rng = random.Random(f"{seed} crowd")
        plan = chaos.draw_plan(rng, crowd.readers)
        suffering = asyncio.create_task(chaos.suffer(crowd, plan))
        names = [str(each.seat.replica) for each in crowd.readers]
        async with asyncio.timeout(chaos.CALM_S):
            await asyncio.gather(*(chaos.come(crowd, name, rng.uniform(0, 0.8)) for name in names))
            await suffering
        assert crowd.watch.depth >= 3
        assert crowd.watch.fillings >= readers // 6
        assert crowd.watch.reports
        await chaos.follow(crowd, 2)

    told([f"r{i}" for i in range(readers)], story, seed)
