"""Engines that follow by themselves: what they read and when, and what they show of it. One suite over all of them."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from tensorhub.errors import SourceFailed
from tensorhub.ports import Course
from tests.conformance.sources import FOLLOWER_PARAMS, FOLLOWERS, FollowerCase
from tests.support.courses import PATIENCE_S, Place, Shard, course, follow, until

MIB = 1 << 20


@pytest.fixture(params=FOLLOWER_PARAMS)
def case(request) -> FollowerCase:
    return FOLLOWERS[request.param]


def check_complete(shard: Shard, place: Place, one: Course) -> None:
    """Every chunk of the course is right and told; nothing beside it was written."""
    wanted = one.numbers.tolist()
    for chunk in range(shard.whole):
        if chunk in wanted:
            assert place.chunk(chunk) == shard.chunks[chunk], chunk
        else:
            assert place.is_untouched(chunk), chunk
    assert place.gaps_are_untouched()
    nbytes = sum(shard.sizes[chunk] for chunk in wanted)
    digests = 8 * len(wanted) if one.is_verified else 0
    assert one.told.tolist() == [shard.whole, nbytes, nbytes + digests]
    assert one.done.all()


@pytest.mark.parametrize("verified", [True, False], ids=["verified", "digest-less"])
def test_nothing_is_read_before_the_source_shows_it(engine, source, verified):
    """What lies at or above the source's watermark is not read, not even to be thrown away: it holds other bytes until
    it is shown, and none of those arrive. The course begins before anything is shown."""
    sizes = [5000] * 12
    shard, place = Shard(source, sizes, digests=verified), Place(sizes)
    one = course(shard, place, verified=verified)

    async def main() -> None:
        following = follow(engine, source.locate(), one)
        for stop in (1, 3, 4, 11, 12):
            assert all(place.is_untouched(chunk) for chunk in range(shard.placed, shard.whole))
            shard.reveal(stop)
            await until(lambda stop=stop: int(one.told[0]) == stop, following)
            assert [place.chunk(chunk) for chunk in range(stop)] == shard.chunks[:stop]
            assert one.done.tolist() == [1] * stop + [0] * (shard.whole - stop)
        await following

    asyncio.run(main())
    check_complete(shard, place, one)


class Watcher:
    """A thread that looks at a place's own block all the time, as readers do, and at the bytes that it covers."""

    def __init__(self, shard: Shard, place: Place) -> None:
        self.seen = [0]
        self.wrong: list[str] = []
        self._shard, self._place = shard, place
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.is_set():
            try:
                self._look()
            except AssertionError as error:
                self.wrong.append(str(error) or "another header")

    def _look(self) -> None:
        before, now = self.seen[-1], self._place.look()
        if now is None or now == before:
            return
        if now < before:
            self.wrong.append(f"{now} after {before}")
        for chunk in range(before, now):
            if self._place.chunk(chunk) != self._shard.chunks[chunk]:
                self.wrong.append(f"chunk {chunk} is not there at {now}")
        self.seen.append(now)


def test_chunks_are_shown_in_the_own_block_as_they_are_verified(engine, source):
    """The own header is whole at every look but one caught half-written; its watermark never falls, covers only what
    is there, and has risen by the time that the course tells of it, with the course still running."""
    sizes = [30_000] * 40
    shard, place = Shard(source, sizes), Place(sizes)
    one = course(shard, place)

    async def main() -> None:
        following = follow(engine, source.locate(), one)
        for stop in range(1, 41):
            shard.reveal(stop)
            await until(lambda stop=stop: int(one.told[0]) == stop, following)
            assert place.look() == stop
        await following

    with Watcher(shard, place) as watcher:
        asyncio.run(main())
    assert watcher.wrong == []
    assert place.look() == 40
    check_complete(shard, place, one)


@pytest.mark.parametrize(("theirs", "ours"), [(1, 3), (4, 1), (3, 5), (7, 7)])
def test_chunks_in_several_runs_on_either_side(engine, source, theirs, ours):
    """overlapping_views: chunks cut differently there and here, with gaps: every byte arrives, and no other changes."""
    sizes = [1, 2, 4096, 70_000, 3, 1_100_000, 11]
    shard, place = Shard(source, sizes, cuts=theirs), Place(sizes, cuts=ours)
    one = course(shard, place)

    async def main() -> None:
        following = follow(engine, source.locate(), one)
        for stop in (2, 5, 7):
            shard.reveal(stop)
            await until(lambda stop=stop: int(one.told[0]) == stop, following)
        await following

    asyncio.run(main())
    check_complete(shard, place, one)


def test_a_course_of_some_chunks_waits_for_those_alone(engine, source):
    """subset_selection_exact: chunks that nobody wants are not read; the prefix that is shown reaches over them to the
    next one that is to do."""
    sizes = [2000] * 20
    shard, place = Shard(source, sizes), Place(sizes)
    one = course(shard, place, [3, 4, 9, 17])

    async def main() -> None:
        following = follow(engine, source.locate(), one)
        for stop, prefix in ((4, 4), (9, 9), (10, 17), (18, 20)):
            shard.reveal(stop)
            await until(lambda prefix=prefix: int(one.told[0]) == prefix, following)
            assert place.look() == prefix
        await following

    asyncio.run(main())
    check_complete(shard, place, one)


def test_a_course_without_a_block_of_its_own_shows_nothing(engine, source):
    """A reader that nobody reads from has nothing to show, and tells its progress all the same."""
    sizes = [2000] * 5
    shard, place = Shard(source, sizes), Place(sizes)
    one = course(shard, place, shows=False)
    shard.reveal(5)

    async def main() -> None:
        await follow(engine, source.locate(), one)

    asyncio.run(main())
    assert place.look() == 0
    check_complete(shard, place, one)


@pytest.mark.slow
@pytest.mark.parametrize("verified", [True, False], ids=["verified", "digest-less"])
def test_twenty_thousand_tiny_chunks(engine, source, verified):
    """100k_tiny_tensors: many times what one request or one call of the kernel takes, in steps that fall anywhere."""
    sizes = [16] * 20_000
    shard, place = Shard(source, sizes, digests=verified), Place(sizes)
    one = course(shard, place, verified=verified)

    async def main() -> None:
        following = follow(engine, source.locate(), one)
        for stop in (1, 700, 1025, 9999, 20_000):
            shard.reveal(stop)
            await until(lambda stop=stop: int(one.told[0]) == stop, following)
        await following

    asyncio.run(main())
    assert (one.told.tolist(), place.look()) == ([20_000, 320_000, 480_000 if verified else 320_000], 20_000)
    assert [place.chunk(chunk) for chunk in range(20_000)] == shard.chunks


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[8 * MIB], [8 * MIB, 8 * MIB, 5]], ids=["one", "several"])
def test_the_largest_chunks(engine, source, sizes):
    """slice_boundary: with its digest a chunk of 8 MiB is more than one request may ask for."""
    shard, place = Shard(source, sizes), Place(sizes)
    one = course(shard, place)
    shard.reveal(len(sizes))

    async def main() -> None:
        await follow(engine, source.locate(), one)

    asyncio.run(main())
    check_complete(shard, place, one)


@pytest.mark.slow
def test_courses_do_not_hold_each_other_up(engine, source):
    """Several courses to one source at once: one that waits for more keeps none of the others waiting, nor a read."""
    sizes = [100_000] * 90
    starving, *others = [Shard(source, sizes, seed=seed) for seed in range(4)]
    places = [Place(sizes) for _ in range(4)]
    courses = [course(*pair) for pair in zip([starving, *others], places, strict=True)]

    async def main() -> None:
        starving.reveal(1)
        for shard in others:
            shard.reveal(shard.whole)
        waits = follow(engine, source.locate(), courses[0])
        await until(lambda: int(courses[0].told[0]) == 1, waits)
        await asyncio.gather(*(follow(engine, source.locate(), one) for one in courses[1:]))
        target = np.zeros(8, dtype=np.uint8)
        ranges = course(others[0], places[1], [0], verified=False).ranges
        ranges.nbytes[0], ranges.local[0] = 8, target.ctypes.data
        await engine.read(source.locate(), ranges, PATIENCE_S)
        assert target.tobytes() == others[0].chunks[0][:8]
        assert not waits.done()
        starving.reveal(starving.whole)
        await waits

    asyncio.run(main())
    for shard, place, one in zip([starving, *others], places, courses, strict=True):
        check_complete(shard, place, one)


@pytest.mark.parametrize("what", ["bytes", "digest"])
@pytest.mark.parametrize("wrong", [0, 6, 11])
def test_a_wrong_chunk_is_named_and_nothing_from_it_on_is_shown(engine, source, what, wrong):
    """relay_does_not_propagate_corruption: one bit of a chunk or of its digest. The error names the chunk; the own
    block shows at most those before it; what is marked as done is right, and what landed counts, the wrong one too."""
    sizes = [3000] * 12
    shard, place = Shard(source, sizes), Place(sizes)
    one = course(shard, place)
    shard.reveal(12)
    shard.spoil(wrong, what)

    async def main() -> None:
        with pytest.raises(SourceFailed, match=f"chunk {wrong} does not match"):
            await follow(engine, source.locate(), one)

    asyncio.run(main())
    shown, done = place.look(), np.flatnonzero(one.done).tolist()
    assert shown is not None
    assert shown <= wrong not in done
    assert set(range(shown)) <= set(done)
    assert all(place.chunk(chunk) == shard.chunks[chunk] for chunk in done)
    prefix, verified, landed = one.told.tolist()
    assert (prefix, verified) == (shown, 3000 * len(done))
    assert landed >= verified + 8 * len(done)
