"""A reader's data path: follow one source's watermark, read what lies below it, verify it, raise one's own.

Given a granted source, this module decides when to poll, how much to read at once, and whether what arrived may be
believed; an engine that can follow by itself (`ports.Follower`) does that in its own threads, under the same rules. It
never asks the server anything and never picks a source: it returns when the destination is complete, or raises
`SourceFailed`, and can then go on from its counter with another source.

Order is everything. The header is read and compared with the *granted* generation before the first byte. Digests and
data are read only below the watermark that was read before them. A chunk counts, is shown to others and is never
read again once its digest matches. After the last data read has completed, the header is read once more, by a read
issued after it: a generation that ended in between means that bytes may be torn, whatever the digests say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from tensorhub.errors import Broken, EngineUnavailable, SourceFailed, SourceSilent
from tensorhub.pipeline.counter import Counter, Span
from tensorhub.pipeline.course import LANDED_BYTES, lay
from tensorhub.pipeline.exposure import DIGEST_BYTES, HEADER_BYTES, Header
from tensorhub.pipeline.manifest import Manifest
from tensorhub.pipeline.memory_map import MemoryMap
from tensorhub.pipeline.plan import Plan
from tensorhub.pipeline.source import STALL_S, Blame, Source, fetch
from tensorhub.ports import U64, Chunks, Course, Follower, Ranges

#: Bytes of one batch, at most: handing one to an engine costs a fraction of a millisecond of Python, and a batch must
#: be long beside it, or the copying threads wait. The first is one chunk: the link may be slow.
BATCH_BYTES_MAX = 256 << 20
#: A batch takes about this long: a reader's own watermark, and with it the next reader of a chain, moves this often.
BATCH_SECONDS = 0.03
#: The same behind a source that was not complete when it was met: what is left when it is, is then soon read.
BATCH_SECONDS_BEHIND = 0.015
#: Batches in flight: one landing, one ready to start.
WINDOW = 2
#: Between two looks at a watermark that did not move.
POLL_S_MIN = 0.0002
POLL_S_MAX = 0.02
#: The same while something is in flight: then a later look costs nothing yet.
POLL_BUSY_S = 0.001
#: A header is rewritten in well under a microsecond, but whoever writes it may lose its processor half-way. These looks
#: take a tenth of a second or more; torn for longer, it is that of a broken or lying source.
TORN_HEADERS_MAX = 100
TORN_PAUSE_S = 0.001
#: A source that lives and has nothing new waits for its own source: whoever reads from *that* one finds out after
#: `STALL_S`. All behind wait so many times as long, or the healthy would be reported all along a chain.
STARVED_STALLS_MAX = 3
#: A source that has been silent for `STALL_S` has so long, or a quarter of that, to answer one more look: a way there
#: and back, and less than the half second within which a stop is to be noticed after that.
LAST_LOOK_S = 0.35
#: A reader that waits shows so often that it lives. Equals BEAT_NS in native/batch.h.
BEAT_S = 0.1
#: What shows no beat for so long stands still: some beats may come late where processors are short.
SIGN_S = 5 * BEAT_S
#: Between two looks at what an engine that follows by itself has done: how late a reader that must stop does so.
SAMPLE_S = 0.2


@dataclass(slots=True)
class Filling:
    """One destination being filled, from however many sources in turn.

    `digests` has one slot per chunk; slots of a batch in flight hold what its source claims, slots of counted chunks
    what was verified. `raise_to` is told the verified prefix after each batch.
    """

    manifest: Manifest
    memory: MemoryMap
    digests: U64
    counter: Counter
    raise_to: Callable[[int], None]
    #: Told of a prefix that the engine has shown already, in the header at `own_block`.
    shown: Callable[[int], None]
    #: Called before each look at the source: raises to make this reader stop (lease lost, transaction aborted).
    fence: Callable[[], None]
    verified: bool
    #: Writes the digests of chunks [first, stop) that have landed, where the reading engine cannot: on devices.
    digest_landed: Callable[[int, int, U64], Awaitable[None]] | None = None
    #: Smaller batches are not worth their while, if so much is ready.
    batch_bytes_min: int = 1
    #: Seconds spent in looks that were issued after the last byte.
    confirm_s: float = 0.0
    #: Seconds without progress after which a source is given up.
    stall_s: float = STALL_S
    #: Shows that this reader lives although it has nothing new.
    beat: Callable[[], None] = lambda: None
    #: Our own progress block, for an engine that follows by itself; 0: nobody reads from here.
    own_block: int = 0
    sample_s: float = SAMPLE_S
    #: Bytes that landed, those included that were read in vain.
    bytes_read: int = 0
    #: Whose fault the last failure was.
    blame: Blame = Blame.ENGINE
    #: Bytes per second of the last batches, for the size of the next.
    _rate: float = 0.0
    _batch_s: float = BATCH_SECONDS_BEHIND
    #: What an engine follows now, and what its source showed when it was last looked at.
    _course: Course | None = None
    _shown: Header | None = None

    async def read_from(self, source: Source, source_map: MemoryMap) -> None:
        """Fill what is missing from `source`. Raises `SourceFailed`; the counter keeps what was verified."""
        self.blame = Blame.ENGINE
        if not source.begun:
            await self._wait_begun(source)
        if isinstance(source.engine, Follower) and self.digest_landed is None:
            await self._follow_by_engine(source, source.engine, source_map)
        else:
            await self._follow_by_batches(source, self._plan(source_map))
        await self._confirm(source)

    def sample(self) -> None:
        """Count what an engine that follows by itself has verified by now."""
        if self._course is not None:
            self._count(self._course)

    def _plan(self, source_map: MemoryMap) -> Plan:
        manifest = self.manifest
        return Plan.of(source_map, self.memory, manifest.chunk_starts, manifest.chunk_ends, self.counter.todo)

    async def _wait_begun(self, source: Source) -> None:
        """Until the source shows the granted generation, and not what its memory held before."""
        time = asyncio.get_running_loop().time
        began = time()
        while True:
            self.fence()
            header = await self._whole_header(source, self.stall_s)
            if header.generation == source.generation or header.incarnation != source.incarnation:
                return  # or it is another process: the next look says so
            waited = time() - began
            if waited > self.stall_s:
                self.blame = Blame.SILENCE
                raise SourceFailed(f"{source.name} was granted this version and did not begin for {waited:.3g} s")
            await asyncio.sleep(min(max(waited / 4, POLL_S_MIN), POLL_S_MAX))

    # ------------------------------------------------------------ by the engine

    async def _follow_by_engine(self, source: Source, engine: Follower, source_map: MemoryMap) -> None:
        stalls = 0
        while not self.counter.is_complete:
            self.fence()
            # Before the first byte: a source that is not what was granted, or has no digests, is said so by name.
            self._shown, before = await self._header(source), self.counter.bytes_done
            course = lay(
                self._plan(source_map),
                source.exposure.block,
                source.generation,
                self.own_block,
                self.digests,
                verified=self.verified,
            )
            try:
                await self._run_course(source, engine, course)
            except SourceSilent as silence:
                stalls = 1 if self.counter.bytes_done > before else stalls + 1
                await self._check_starved(source, stalls, silence)
            except SourceFailed as failure:
                await self._explain(source)
                raise SourceFailed(f"{source.name}: {failure.message}", failure.where) from failure
            else:
                if not self.counter.is_complete:
                    raise SourceFailed(
                        f"{source.name}: {source.engine.name} was done with {self.counter.todo} left to do"
                    )

    async def _run_course(self, source: Source, engine: Follower, course: Course) -> None:
        """Let the engine follow, and count what it has done, also when it fails or is to stop."""
        time = asyncio.get_running_loop().time
        following, self._course = asyncio.ensure_future(engine.follow(source.peer, course, self.stall_s)), course
        landed, moved = 0, time()
        try:
            while not following.done():
                await asyncio.wait([following], timeout=min(self.sample_s, self.stall_s / 4))
                self._count(course)
                self.fence()
                if int(course.told[LANDED_BYTES]) != landed:
                    landed, moved = int(course.told[LANDED_BYTES]), time()
                elif time() - moved >= self.stall_s / 2 and not following.done():
                    moved = time() + self.stall_s  # once is enough
                    await self._look_again(source)
            following.result()
        finally:
            following.cancel()
            try:
                # Nothing may land after this method has returned.
                await asyncio.gather(following, return_exceptions=True)
            finally:
                self._course = None
                self._count(course)
                # Of a chunk that was read in vain the digest may count as well.
                digests = DIGEST_BYTES * int(course.done.sum()) if course.is_verified else 0
                self.bytes_read += int(course.told[LANDED_BYTES]) - digests

    async def _look_again(self, source: Source) -> None:
        """In the middle of a silence: what the source shows at its end is compared with this."""
        with suppress(SourceFailed, EngineUnavailable):
            self._shown = await self._header(source, min(self.stall_s / 4, LAST_LOOK_S))
        self.blame = Blame.ENGINE  # the end of the silence decides whose fault it was

    def _count(self, course: Course) -> None:
        watermark = self.counter.narrow(course.numbers[course.done == 0])
        if course.own_block:
            self.shown(watermark)
        else:
            self.raise_to(watermark)

    async def _check_starved(self, source: Source, stalls: int, silence: SourceSilent) -> None:
        """Return if the source itself waits for more, lives, and may go on doing so; else raise.

        What counts is what it showed in the middle of the silence. More may have come to it a moment ago: all along a
        chain the stalls end together, when the first of it has found another source.
        """
        shown = self._shown
        if shown is None:
            raise Broken("a course began without a look at its source")
        began = asyncio.get_running_loop().time()
        try:
            now = await self._sign(source, shown)
        except SourceFailed as failure:
            if self.blame is not Blame.SOURCE:
                self.blame = Blame.SILENCE
                waited_s = self.stall_s + asyncio.get_running_loop().time() - began
                raise SourceFailed(f"{source.name} gave no sign for {waited_s:.3g} s: {failure.message}") from failure
            raise
        is_still = (now.beats, now.watermark) == (shown.beats, shown.watermark)
        if is_still or shown.watermark > self.counter.watermark or stalls >= STARVED_STALLS_MAX:
            self.blame = Blame.SILENCE
            raise SourceFailed(
                f"{source.name} made no progress for {stalls * self.stall_s:g} s at chunk {self.counter.watermark}"
            ) from silence

    async def _sign(self, source: Source, shown: Header) -> Header:
        """What the source shows now; after a silence too short for some beats, one that is still has some time more."""
        time = asyncio.get_running_loop().time
        until = time() + SIGN_S - self.stall_s / 2
        while True:
            now = await self._header(source, min(self.stall_s / 4, LAST_LOOK_S))
            if (now.beats, now.watermark) != (shown.beats, shown.watermark) or time() >= until:
                return now
            self.beat()
            await asyncio.sleep(BEAT_S)

    async def _explain(self, source: Source) -> None:
        """After a failure of the engine: raise what the source itself says against it, if anything."""
        with suppress(EngineUnavailable):
            try:
                await self._header(source)
            except SourceFailed:
                if self.blame is not Blame.ENGINE:
                    raise

    # ------------------------------------------------------------ by batches

    async def _follow_by_batches(self, source: Source, plan: Plan) -> None:
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._follow(source, plan, tasks)
        finally:
            for task in tasks:
                task.cancel()
            # Nothing may land after this method has returned: wait for every read to be over.
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, source: Source, plan: Plan, tasks: list[asyncio.Task[None]]) -> None:
        loop = asyncio.get_running_loop()
        limit, whole, beats = 0, self.manifest.chunks, -1
        moved = lived = beaten = loop.time()
        while not self.counter.is_complete:
            self.fence()
            if limit < whole and self.counter.ready_bytes(limit) < self._target():
                header = await self._header(source)
                if limit == 0:
                    self._batch_s = BATCH_SECONDS if header.watermark == whole else BATCH_SECONDS_BEHIND
                if header.watermark > limit:
                    limit, moved = header.watermark, loop.time()
                if header.beats != beats:
                    beats, lived = header.beats, loop.time()
            self._start(source, plan, limit, tasks)
            # The longer nothing moves, the longer until the next look: at most a quarter later than it could be.
            poll = min(max((loop.time() - moved) / 4, POLL_S_MIN), POLL_S_MAX)
            if tasks:
                must_look = limit < whole and len(tasks) < WINDOW
                finished, _ = await asyncio.wait(
                    tasks, timeout=max(poll, POLL_BUSY_S) if must_look else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in [task for task in tasks if task in finished]:
                    tasks.remove(task)
                    task.result()
                    moved = loop.time()
            else:
                await asyncio.sleep(poll)
            waits = limit < whole and not tasks and not self.counter.ready_bytes(limit)
            if waits and loop.time() - beaten > BEAT_S:
                self.beat()
                beaten = loop.time()
            still_s = loop.time() - (max(moved, lived) if waits else moved)
            if still_s > self.stall_s or loop.time() - moved > STARVED_STALLS_MAX * self.stall_s:
                self.blame = Blame.SILENCE
                raise SourceFailed(f"{source.name} made no progress for {loop.time() - moved:.3g} s at chunk {limit}")

    def _start(self, source: Source, plan: Plan, limit: int, tasks: list[asyncio.Task[None]]) -> None:
        """Start batches below `limit`, up to the window. Small ones only when nothing else would be in flight."""
        loop = asyncio.get_running_loop()
        while len(tasks) < WINDOW:
            if tasks and limit < self.manifest.chunks and self.counter.ready_bytes(limit) < self._target() // 2:
                return
            batch = self.counter.take(limit, self._target())
            if batch is None:
                return
            tasks.append(loop.create_task(self._batch(source, plan, batch)))

    async def _batch(self, source: Source, plan: Plan, batch: Span) -> None:
        """Read a batch of chunks and their digests, verify, count. The source's digests land in their final slots."""
        try:
            wrong = await self._read(source, plan, batch)
        except BaseException:
            self.counter.failed(batch)
            raise
        if wrong is not None:
            self.counter.failed(batch)
            raise SourceFailed(f"{source.name} served wrong bytes: chunk {wrong} does not match its digest")
        try:
            # Taken back and published anew meanwhile, it would show digests that match again, of other bytes.
            await self._header(source)
        except BaseException:
            self.counter.failed(batch)
            raise
        self.raise_to(self.counter.verified(batch))

    async def _read(self, source: Source, plan: Plan, batch: Span) -> int | None:
        """Bring a batch; the first chunk whose landed bytes do not match the digest beside it, or None."""
        loop = asyncio.get_running_loop()
        first, stop = batch
        began = loop.time()
        reads, firsts = plan.batch(first, stop)
        # An engine that does nothing and reports success must find no digests to match, neither those of an earlier
        # version nor equal ones of nothing.
        found = np.ones(stop - first, dtype=np.uint64)
        self.digests[first:stop] = 0
        if self.verified:
            reads = _with_digests(reads, source, self.digests, first, stop)
        chunks = Chunks(firsts, found) if self.verified and self.digest_landed is None else None
        try:
            await source.engine.read(source.peer, reads, self.stall_s, chunks)
        except SourceFailed as failure:
            self.bytes_read += failure.where.bytes_done or 0
            self.note_silence(began)
            raise
        self.bytes_read += self.counter.span_bytes(batch)
        if self.verified and self.digest_landed is not None:
            await self.digest_landed(first, stop, found)
        rate = self.counter.span_bytes(batch) / max(loop.time() - began, 1e-6)
        self._rate = max(rate, 0.7 * self._rate)  # up at once, down slowly
        wrong = np.flatnonzero(found != self.digests[first:stop])
        return first + int(wrong[0]) if self.verified and len(wrong) else None

    def note_silence(self, began: float) -> None:
        """A read that failed by its deadline was silence, whatever the engine calls it."""
        if asyncio.get_running_loop().time() - began >= self.stall_s:
            self.blame = Blame.SILENCE

    async def _header(self, source: Source, timeout_s: float | None = None) -> Header:
        """The source's header, of the granted generation, or `SourceFailed`."""
        header = await self._whole_header(source, self.stall_s if timeout_s is None else timeout_s)
        try:
            self._check_granted(source, header)
        except SourceFailed:
            self.blame = Blame.SOURCE
            raise
        return header

    async def _whole_header(self, source: Source, timeout_s: float) -> Header:
        for looks in range(TORN_HEADERS_MAX):
            began = asyncio.get_running_loop().time()
            try:
                data = await fetch(source.engine, source.peer, source.exposure.block, HEADER_BYTES, timeout_s)
            except SourceFailed:
                self.note_silence(began)
                raise
            header = Header.unpack(data)
            if header is not None:
                return header
            await asyncio.sleep(TORN_PAUSE_S if looks else 0)
        raise SourceFailed(f"{source.name} shows no whole progress block in {TORN_HEADERS_MAX} looks")

    def _check_granted(self, source: Source, header: Header) -> None:
        if header.incarnation != source.incarnation:
            raise SourceFailed(f"{source.name} was restarted: its progress block belongs to another process")
        if header.generation != source.generation:
            raise SourceFailed(f"{source.name} withdrew what it had granted: its buffers hold something else now")
        if header.manifest != source.manifest:
            raise SourceFailed(f"{source.name} shows another manifest than was granted")
        if header.chunks != self.manifest.chunks:
            raise SourceFailed(f"{source.name} shows {header.chunks} chunks, the manifest has {self.manifest.chunks}")
        if self.verified and not header.digests:
            raise SourceFailed(f"{source.name} shows no digests for a version that has them")

    async def _confirm(self, source: Source) -> None:
        """Untorn: a look issued after the last data read completed must still show the granted generation."""
        if self.counter.in_flight:
            raise Broken("the final look was issued while data reads were in flight")
        began = asyncio.get_running_loop().time()
        self.fence()
        await self._header(source)
        self.confirm_s += asyncio.get_running_loop().time() - began

    def _target(self) -> int:
        return int(max(self.batch_bytes_min, min(BATCH_BYTES_MAX, max(self._rate * self._batch_s, 1))))


def _with_digests(batch: Ranges, source: Source, digests: U64, first: int, stop: int) -> Ranges:
    """The batch, plus the source's digests of its chunks: below the watermark both are final."""
    remote = source.exposure.block + HEADER_BYTES + DIGEST_BYTES * first
    local = digests.ctypes.data + DIGEST_BYTES * first
    extra = (remote, local, DIGEST_BYTES * (stop - first))
    columns = zip((batch.remote, batch.local, batch.nbytes), extra, strict=True)
    return Ranges(*(np.append(column, np.uint64(value)) for column, value in columns))
