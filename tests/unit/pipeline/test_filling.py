"""A filling over an engine that follows by itself: what it makes of what the engine says, on virtual time.

The engine here does what a test says, in place of threads that nobody could time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest

from tensorhub import native
from tensorhub.errors import LeaseLost, SourceFailed, SourceSilent
from tensorhub.pipeline.follow import SIGN_S, STARVED_STALLS_MAX
from tensorhub.pipeline.source import Blame
from tensorhub.ports import Chunks, Course, Ranges
from tensorhub.transport.memory import MemoryEngine
from tensorhub.types import Generation, SessionId
from tests.conformance.sources import SourceHere
from tests.support.courses import Place, Shard, Vessel, plain
from tests.support.virtual_time import run_virtual

STALL_S = 10.0
SHORT_S = 0.2
MANIFEST, SIZES = plain(10 * (64 << 10) - 5)
WHOLE = len(SIZES)


class Scripted(MemoryEngine):
    """Follows as told: one act for each course."""

    def __init__(self, *acts: Callable[[Course], Awaitable[None]]) -> None:
        super().__init__()
        self.acts = list(acts)
        self.peer = b""
        self.begun_s: list[float] = []
        self.stall_s = STALL_S

    async def follow(self, peer: bytes, course: Course, stall_s: float) -> None:
        assert stall_s == self.stall_s
        self.peer = peer
        self.begun_s.append(asyncio.get_running_loop().time())
        await self.acts.pop(0)(course)

    async def bring(self, course: Course, stop: int) -> None:
        """All chunks below `stop`, as an engine counts and shows them."""
        for at in np.flatnonzero(course.numbers < stop).tolist():
            first, last = int(course.firsts[at]), int(course.firsts[at + 1])
            ranges = course.ranges
            one = Ranges(ranges.remote[first:last], ranges.local[first:last], ranges.nbytes[first:last])
            await self.read(self.peer, one, STALL_S)
            course.done[at] = 1
            course.told[2] += one.nbytes.sum()


async def silent(_: Course) -> None:
    await asyncio.sleep(STALL_S)
    raise SourceSilent("nothing came")


async def waiting(shard: Shard) -> None:
    """The same, from a source that lives."""
    await asyncio.sleep(STALL_S * 3 / 4)
    shard.beat()
    await asyncio.sleep(STALL_S / 4)
    raise SourceSilent("nothing came")


@pytest.fixture
def memory():
    opened = SourceHere()
    yield opened
    opened.end()


@pytest.fixture
def shard(memory) -> Shard:
    return Shard(memory, SIZES, manifest=MANIFEST.digest)


@pytest.fixture
def vessel() -> Vessel:
    return Vessel(MANIFEST, Place(SIZES), stall_s=STALL_S)


def blame(vessel: Vessel, shard: Shard, engine: MemoryEngine, message: str, *, begun: bool = True) -> Blame:
    """Whose fault a filling's failure is, which says `message`."""

    async def main() -> None:
        with pytest.raises(SourceFailed, match=message):
            await vessel.fill(shard, engine, begun=begun)

    run_virtual(main())
    return vessel.filling.blame


def check_filled(vessel: Vessel, shard: Shard) -> None:
    assert [vessel.place.chunk(chunk) for chunk in range(WHOLE)] == shard.chunks
    assert vessel.filling.counter.is_complete
    assert vessel.shown == sorted(vessel.shown)
    assert vessel.shown[-1] == WHOLE


def test_a_course_is_counted_and_then_looked_at_once_more(shard, vessel):
    """What the engine brought counts, without digests; the last look is issued after it."""
    shard.reveal(WHOLE)
    engine = Scripted()
    engine.acts.append(lambda course: engine.bring(course, WHOLE))
    run_virtual(vessel.fill(shard, engine))
    check_filled(vessel, shard)
    assert vessel.filling.bytes_read == sum(SIZES)


def test_a_generation_that_ends_after_the_last_byte_is_caught(shard, vessel):
    """reader_fetched_before_unpublish: all bytes are there and right; whether they are torn nobody could say."""
    shard.reveal(WHOLE)
    engine = Scripted()

    async def act(course: Course) -> None:
        await engine.bring(course, WHOLE)
        shard.withdraw()

    engine.acts.append(act)
    assert blame(vessel, shard, engine, "the source withdrew what it had granted") is Blame.SOURCE
    assert vessel.filling.counter.is_complete


def test_an_engine_that_reports_success_without_bytes_fails(shard, vessel):
    """transport_lies: a course that is done with chunks left is a failure, not a reason to ask for ever."""
    shard.reveal(WHOLE)

    async def lie(_: Course) -> None:
        """Moves nothing."""

    assert blame(vessel, shard, Scripted(lie), r"memory was done with \[\(0, 10\)\] left") is Blame.ENGINE


def test_a_failure_of_the_engine_is_the_source_s_where_the_source_says_so(shard, vessel):
    """A stream that ends tells nothing; the header tells that the version was withdrawn. Else another engine may help.
    What had come before counts."""
    engine = Scripted()

    async def fail(course: Course) -> None:
        await engine.bring(course, 4)
        raise SourceFailed("the stream ended")

    async def withdrawn(_: Course) -> None:
        shard.withdraw()
        raise SourceFailed("the stream ended")

    shard.reveal(WHOLE)
    engine.acts += [fail, withdrawn]
    assert blame(vessel, shard, engine, "the source: the stream ended") is Blame.ENGINE
    assert (vessel.shown[-1], vessel.filling.bytes_read) == (4, sum(SIZES[:4]))
    assert blame(vessel, shard, engine, "withdrew what it had granted") is Blame.SOURCE
    assert (vessel.filling.counter.todo, vessel.filling.bytes_read) == ([(4, WHOLE)], sum(SIZES[:4]))


def test_bytes_of_a_chunk_that_fails_are_bytes_read(shard, vessel):
    """What landed in vain counts beside what was verified: what is read is never less than what is there."""
    shard.reveal(WHOLE)
    engine = Scripted()

    async def fail(course: Course) -> None:
        await engine.bring(course, 3)
        course.told[2] += 1000 + 8
        raise SourceFailed("wrong bytes: chunk 3")

    engine.acts.append(fail)
    assert blame(vessel, shard, engine, "wrong bytes") is Blame.ENGINE
    assert vessel.filling.bytes_read == sum(SIZES[:3]) + 1000 + 8


# ------------------------------------------------------------------ silence


def test_a_starving_source_is_kept_longer(shard, vessel):
    """It answers and has nothing new: it waits for its own source, and whoever reads from that one finds out first."""
    engine = Scripted(*[lambda _: waiting(shard)] * (STARVED_STALLS_MAX + 1))
    shard.reveal(2)
    engine.acts[0] = lambda course: starve_after(engine, course, 2, shard)
    assert blame(vessel, shard, engine, "no progress for 30 s at chunk 2") is Blame.SILENCE
    assert np.diff(engine.begun_s).tolist() == pytest.approx([STALL_S] * (STARVED_STALLS_MAX - 1))


async def starve_after(engine: Scripted, course: Course, stop: int, shard: Shard) -> None:
    await engine.bring(course, stop)
    await waiting(shard)


def test_a_source_that_stands_still_is_not_kept(shard, vessel):
    """source_stopped: its memory can still be read, and has nothing new; but it shows no life either, as a reader that
    waits does."""
    engine = Scripted(silent)
    shard.reveal(2)

    async def stop(course: Course) -> None:
        await engine.bring(course, 2)
        await silent(course)

    engine.acts[0] = stop
    assert blame(vessel, shard, engine, "no progress for 10 s at chunk 2") is Blame.SILENCE


def test_a_late_beat_is_waited_for_where_silences_are_short(shard):
    """A source that lives may lose its processor for a few beats: `stall_s` may be shorter than that. Meanwhile we show
    that we live ourselves."""
    beats: list[float] = []
    vessel, engine = Vessel(MANIFEST, Place(SIZES), stall_s=SHORT_S), Scripted()
    vessel.filling.beat = lambda: beats.append(asyncio.get_running_loop().time())
    engine.stall_s = SHORT_S

    async def late(_: Course) -> None:
        asyncio.get_running_loop().call_later(SHORT_S + SIGN_S / 2, shard.beat)
        await asyncio.sleep(SHORT_S)
        raise SourceSilent("nothing came")

    async def rest(course: Course) -> None:
        shard.reveal(WHOLE)
        await engine.bring(course, WHOLE)

    engine.acts += [late, rest]
    run_virtual(vessel.fill(shard, engine))
    check_filled(vessel, shard)
    assert beats


def test_each_chunk_gives_a_starving_source_its_time_anew(shard, vessel):
    """Stalls are counted in a row."""
    engine = Scripted(*[lambda _: waiting(shard)] * 2)

    async def one_more(course: Course) -> None:
        shard.reveal(1)
        await starve_after(engine, course, 1, shard)

    async def rest(course: Course) -> None:
        shard.reveal(WHOLE)
        await engine.bring(course, WHOLE)

    engine.acts += [one_more, lambda _: waiting(shard), rest]
    run_virtual(vessel.fill(shard, engine))
    check_filled(vessel, shard)


def test_a_source_that_has_more_and_gives_nothing_is_silent(shard, vessel):
    """source_stopped: one stall is enough, and the same source is not asked again."""
    shard.reveal(5)
    engine = Scripted()
    engine.acts += [lambda course: starve_after(engine, course, 3, shard), silent]
    assert blame(vessel, shard, engine, "no progress for 10 s at chunk 3") is Blame.SILENCE
    assert (len(engine.begun_s), vessel.filling.counter.todo) == (1, [(3, WHOLE)])


def test_a_source_that_has_more_as_the_silence_ends_is_not_blamed(shard, vessel):
    """Along a chain all stalls end together, and the next moment the first reader has found another source: the healthy
    ones behind it have more then, and have withheld nothing."""

    async def just_late(course: Course) -> None:
        await asyncio.sleep(STALL_S)
        shard.reveal(WHOLE)
        raise SourceSilent("nothing came")

    engine = Scripted(just_late)
    engine.acts.append(lambda course: engine.bring(course, WHOLE))
    run_virtual(vessel.fill(shard, engine))
    check_filled(vessel, shard)


# ------------------------------------------------------------------ beginning


def test_a_source_that_begins_later_is_waited_for(shard, vessel):
    """Granted a moment ago, it shows what its memory held before: that is neither read nor a failure."""
    shard.show(WHOLE, Generation(bytes(16 * [7])))
    engine = Scripted()
    engine.acts.append(lambda course: engine.bring(course, WHOLE))

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.9 * STALL_S, shard.reveal, WHOLE)
        await vessel.fill(shard, engine, begun=False)
        assert engine.begun_s[0] >= 1000 + 0.9 * STALL_S

    run_virtual(main())
    check_filled(vessel, shard)


def test_a_source_that_never_begins_is_silent(shard, vessel):
    """Bounded: no longer than any other silence."""
    shard.withdraw()
    assert blame(vessel, shard, Scripted(), "did not begin for 10 s", begun=False) is Blame.SILENCE


def test_another_process_is_not_waited_for(shard, vessel):
    """restart_same_name_same_addr: it will never show what its predecessor was granted."""
    other = replace(vessel.place.own, incarnation=SessionId(bytes(16 * [3])))
    native.store(shard.block, other.pack())
    assert blame(vessel, shard, Scripted(), "was restarted", begun=False) is Blame.SOURCE


def test_a_source_that_has_begun_is_not_waited_for(shard, vessel):
    """What is granted as begun and shows another generation was withdrawn."""
    shard.withdraw()
    assert blame(vessel, shard, Scripted(), "withdrew what it had granted") is Blame.SOURCE


@pytest.mark.parametrize("begun", [True, False])
def test_a_header_that_is_never_whole_is_given_up(shard, vessel, begun):
    """Bounded: so many looks, with pauses in which a writer that was held up could have gone on."""
    shard.tear()
    assert blame(vessel, shard, Scripted(), "no whole progress block in 100 looks", begun=begun) is Blame.ENGINE


def test_a_header_torn_for_a_moment_is_believed_when_whole(shard, vessel):
    """A writer that loses its processor half-way is no lying source."""
    shard.tear()
    engine = Scripted()
    engine.acts.append(lambda course: engine.bring(course, WHOLE))

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.05, shard.reveal, WHOLE)
        await vessel.fill(shard, engine)

    run_virtual(main())
    check_filled(vessel, shard)


# ------------------------------------------------------------------ stopping


def test_a_reader_that_must_stop_ends_its_course(shard):
    """The fence is asked while the engine follows: the course is cancelled and over when the filling raises."""
    ended = []
    engine = Scripted()

    async def wait(course: Course) -> None:
        await engine.bring(course, 2)
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(course)

    def fence() -> None:
        if engine.begun_s:
            raise LeaseLost("no longer ours")

    vessel = Vessel(MANIFEST, Place(SIZES), fence=fence, stall_s=STALL_S)
    shard.reveal(WHOLE)
    engine.acts.append(wait)

    async def main() -> None:
        with pytest.raises(LeaseLost):
            await vessel.fill(shard, engine)

    run_virtual(main())
    assert (len(ended), vessel.shown[-1]) == (1, 2)


def test_cancelled_twice_it_still_waits_for_its_course_and_counts_it(shard, vessel):
    """timeout_then_late_write: who is in a hurry must not leave an engine behind that lands bytes."""
    ended = []
    engine = Scripted()

    async def stubborn(course: Course) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            for _ in range(2):
                try:
                    await asyncio.sleep(5)
                except asyncio.CancelledError:
                    continue
            await engine.bring(course, 2)
            ended.append(course)
            raise

    shard.reveal(WHOLE)
    engine.acts.append(stubborn)

    async def main() -> None:
        filling = asyncio.ensure_future(vessel.fill(shard, engine))
        for _ in range(2):
            await asyncio.sleep(1)
            filling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await filling
        assert len(ended) == 1

    run_virtual(main())
    assert vessel.filling.counter.todo == [(2, WHOLE)]
    assert vessel.filling.bytes_read == sum(SIZES[:2])


class Overtaken(MemoryEngine):
    """Reads in batches; before each that brings weights, its source is taken back and published anew."""

    def __init__(self, shard: Shard, anew: Shard) -> None:
        super().__init__()
        self.shard, self.anew = shard, anew

    async def read(self, peer: bytes, ranges: Ranges, timeout_s: float, chunks: Chunks | None = None) -> None:
        if chunks is not None:
            self.shard.become(self.anew)
        await super().read(peer, ranges, timeout_s, chunks)


def test_a_source_published_anew_during_a_batch_is_not_believed(memory, shard, vessel) -> None:
    """relay_does_not_propagate_corruption: its digests match what it holds now, which is not what was granted: nothing
    of it is counted, or shown to others."""
    shard.reveal(WHOLE)
    anew = Shard(memory, SIZES, seed=2)
    anew.reveal(WHOLE)
    blame(vessel, shard, Overtaken(shard, anew), "withdrew what it had granted")
    assert vessel.filling.counter.watermark == 0
    assert vessel.shown == [0]
