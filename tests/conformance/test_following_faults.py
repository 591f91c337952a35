"""Engines that follow by themselves, when something goes wrong at the source or here: what is raised, how soon, and
that nothing lands afterwards."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest

from tensorhub.errors import Closed, SourceFailed, SourceSilent
from tensorhub.ports import Engine
from tensorhub.types import Generation
from tests.conformance.sources import FOLLOWER_PARAMS, FOLLOWERS, FollowerCase, SourceHere, SourceProcess
from tests.support.courses import Place, Shard, course, follow, until

#: Of a source that is to be found silent.
STALL_S = 0.1
#: Later than a test may take.
FAR_S = 3600.0
SIZES = [3000] * 10
#: So much that two threads read it.
LARGE = [128 << 10] * 80


@pytest.fixture(params=FOLLOWER_PARAMS)
def case(request) -> FollowerCase:
    return FOLLOWERS[request.param]


async def check_nothing_lands(engine: Engine, source: SourceHere | SourceProcess, shard: Shard, place: Place) -> None:
    """The source goes on, and brings everything to somebody else: meanwhile nothing of the place changes."""
    place.guard()
    shard.reveal(shard.whole)
    other = Place(shard.sizes)
    await follow(engine, source.locate(), course(shard, other))
    assert other.look() == shard.whole
    assert place.is_guarded()


@pytest.mark.parametrize("shown", [0, 4, 9])
def test_a_generation_that_is_withdrawn_fails_the_course_at_once(engine, source, shown):
    """reader_fetched_before_unpublish: before the first byte, or between two; not after the time for silence, and what
    was verified stays."""
    shard, place = Shard(source, SIZES), Place(SIZES)
    one = course(shard, place)

    async def main() -> None:
        shard.reveal(shown)
        following = follow(engine, source.locate(), one)
        await until(lambda: int(one.told[1]) == 3000 * shown, following)
        shard.withdraw()
        with pytest.raises(SourceFailed) as failed:
            await following
        assert not isinstance(failed.value, SourceSilent)

    asyncio.run(main())
    assert one.done.tolist() == [1] * shown + [0] * (10 - shown)
    assert place.look() == shown
    assert all(place.is_untouched(chunk) for chunk in range(shown, 10))


def test_another_generation_is_not_read(engine, source):
    """reader_fetched_before_unpublish: complete, but not of what was granted: no byte of it arrives."""
    shard, place = Shard(source, SIZES), Place(SIZES)
    shard.reveal(10)
    shard.show(10, Generation(bytes(15) + b"\1"))

    async def main() -> None:
        with pytest.raises(SourceFailed) as failed:
            await follow(engine, source.locate(), course(shard, place))
        assert not isinstance(failed.value, SourceSilent)

    asyncio.run(main())
    assert all(place.is_untouched(chunk) for chunk in range(10))


def test_a_header_that_is_never_whole_shows_nothing(engine, source):
    """Caught half-written once, it is looked at again; for good, nothing below it is believed."""
    shard, place = Shard(source, SIZES), Place(SIZES)
    shard.reveal(10)
    shard.tear()

    async def main() -> None:
        with pytest.raises(SourceFailed):
            await follow(engine, source.locate(), course(shard, place), STALL_S)

    asyncio.run(main())
    assert all(place.is_untouched(chunk) for chunk in range(10))


def test_a_header_that_is_whole_again_is_believed(engine, source):
    """Whoever writes it may have lost its processor half-way; that is no failure."""
    shard, place = Shard(source, SIZES), Place(SIZES)

    async def main() -> None:
        one = course(shard, place)
        shard.reveal(3)
        following = follow(engine, source.locate(), one)
        await until(lambda: int(one.told[0]) == 3, following)
        shard.tear()
        for _ in range(20):
            await asyncio.sleep(0)
        shard.reveal(10)
        await following

    asyncio.run(main())
    assert [place.chunk(chunk) for chunk in range(10)] == shard.chunks


@pytest.mark.parametrize("sizes", [SIZES, LARGE], ids=["one thread", "two threads"])
def test_a_source_with_nothing_new_is_silent_and_then_nothing_lands(engine, source, sizes):
    """timeout_then_late_write: what it brought stays; what it shows after that is read by others only."""
    shard, place = Shard(source, sizes), Place(sizes)
    one = course(shard, place)

    async def main() -> None:
        shard.reveal(4)
        with pytest.raises(SourceSilent):
            await follow(engine, source.locate(), one, STALL_S)
        assert one.done.tolist() == [1] * 4 + [0] * (len(sizes) - 4)
        assert (place.look(), place.chunk(3)) == (4, shard.chunks[3])
        await check_nothing_lands(engine, source, shard, place)

    asyncio.run(main())


@pytest.mark.parametrize("after", [None, 0, 4], ids=["at once", "waiting", "half"])
@pytest.mark.parametrize("sizes", [SIZES, LARGE], ids=["one thread", "two threads"])
def test_a_cancelled_course_leaves_nothing_behind(case, source, sizes, after):
    """timeout_then_late_write, register_cycle_1000: once it has raised nothing lands; what was verified stays marked;
    with the engine closed, threads and descriptors are as before."""

    async def main(engine: Engine) -> None:
        shard, place = Shard(source, sizes), Place(sizes)
        one = course(shard, place)
        following = follow(engine, source.locate(), one)
        if after is not None:
            shard.reveal(after)
            await until(lambda: int(one.told[1]) == sum(sizes[:after]), following)
        else:
            shard.reveal(shard.whole)
            await asyncio.sleep(0)
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
        assert all(place.chunk(chunk) == shard.chunks[chunk] for chunk in np.flatnonzero(one.done).tolist())
        await check_nothing_lands(engine, source, shard, place)
        await engine.close()

    asyncio.run(main(case.open_engine()))  # what it takes to load a library stays
    if not isinstance(source, SourceHere):
        count_descriptors, count_threads = descriptors(), threads()
        asyncio.run(main(case.open_engine()))
        assert descriptors() == count_descriptors
        while threads() > count_threads:  # a joined thread is listed a moment longer
            os.sched_yield()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_closing_the_engine_ends_a_course(case, source):
    """A course that would wait for its source ends when its engine closes, and says why."""
    engine = case.open_engine()
    shard, place = Shard(source, LARGE), Place(LARGE)
    one = course(shard, place)

    async def main() -> None:
        shard.reveal(2)
        following = follow(engine, source.locate(), one)
        await until(lambda: int(one.told[0]) == 2, following)
        await engine.close()
        with pytest.raises(Closed, match="during a read"):
            await following
        with pytest.raises(Closed):
            await follow(engine, source.locate(), course(shard, place))

    asyncio.run(main())


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "under fire"])
def test_memory_that_the_source_takes_back_fails_the_course(engine, source, waits):
    """slept_source_withdrawn: registered no more and unmapped, while the course waits or bytes are on their way: it
    fails, not after the time for silence; what it has marked is right."""
    shard, place = Shard(source, LARGE), Place(LARGE)
    one = course(shard, place)

    async def main() -> None:
        shard.reveal(40)
        following = follow(engine, source.locate(), one)
        await until(lambda: int(one.told[0]) >= (40 if waits else 1), following)
        source.deregister(shard.weights, sum(LARGE))
        source.unmap(shard.weights)
        shard.show(shard.whole)
        with pytest.raises(SourceFailed) as failed:
            await following
        assert not isinstance(failed.value, SourceSilent)

    asyncio.run(main())
    assert all(place.chunk(chunk) == shard.chunks[chunk] for chunk in np.flatnonzero(one.done).tolist())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local", "tcp"])
@pytest.mark.parametrize("begun", [True, False], ids=["waiting", "before"])
def test_a_source_that_is_dead_is_found_at_once(name, begun):
    """source_killed_midchunk: killed while the course waits for more, or before it began: no silence has to pass."""
    case = FOLLOWERS[name]
    source, engine = case.open_source(), case.open_engine()
    assert isinstance(source, SourceProcess)
    shard, place = Shard(source, LARGE), Place(LARGE)
    one, peer = course(shard, place), source.locate()
    shard.reveal(3)

    async def main() -> None:
        if not begun:
            source.kill()
        following = follow(engine, peer, one, FAR_S)
        if begun:
            await until(lambda: int(one.told[0]) == 3, following)
            source.kill()
        with pytest.raises(SourceFailed) as failed:
            await following
        assert not isinstance(failed.value, SourceSilent)
        await engine.close()

    asyncio.run(main())
    source.end()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local", "tcp"])
def test_a_source_that_stands_still_is_silent(name):
    """source_stopped: SIGSTOP, with more to come: silence after its time, and nothing lands when it goes on."""
    case = FOLLOWERS[name]
    source, engine = case.open_source(), case.open_engine()
    assert isinstance(source, SourceProcess)
    shard, place = Shard(source, SIZES), Place(SIZES)
    one, peer = course(shard, place), source.locate()
    shard.reveal(3)

    async def main() -> None:
        following = follow(engine, peer, one, 5 * STALL_S)
        await until(lambda: int(one.told[0]) == 3, following)
        source.stop()
        with pytest.raises(SourceSilent):
            await following
        source.go_on()
        await check_nothing_lands(engine, source, shard, place)
        await engine.close()

    asyncio.run(main())
    source.end()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local", "tcp"])
def test_a_source_whose_interpreter_is_held_is_followed(name):
    """Nothing of the source's interpreter is needed for what it has shown."""
    case = FOLLOWERS[name]
    source, engine = case.open_source(), case.open_engine()
    assert isinstance(source, SourceProcess)
    shard, place = Shard(source, SIZES), Place(SIZES)
    peer = source.locate()
    shard.reveal(10)
    source.hold_interpreter()

    async def main() -> None:
        await follow(engine, peer, course(shard, place))
        await engine.close()

    asyncio.run(main())
    source.end()
    assert [place.chunk(chunk) for chunk in range(10)] == shard.chunks
