"""The background half of a publish: stage, digest, raise the watermark; notice a publisher that writes meanwhile.

What lies on devices is copied to staging one batch ahead of the digests, from the point in the caller's streams at
which it called.

It decides how far readers may read, chunk by chunk, and says at the end what the version's root digest is. It never
talks to the server and never touches the tensors' contents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tensorhub import native
from tensorhub.client.holding import Holding
from tensorhub.errors import Broken, ContractBroken, EngineUnavailable, VersionConflict, Where
from tensorhub.pipeline.digest import root_digest
from tensorhub.pipeline.follow import BEAT_S
from tensorhub.ports import Offload
from tensorhub.types import UNVERIFIED, Digest

if TYPE_CHECKING:
    from tensorhub.client.on_device import Feed, Mark

#: Between two looks at how far the digests are: readers wait no longer for what is digested, unless the trainer holds
#: the interpreter lock. The digests themselves wait for nobody.
LOOK_S = 0.002
#: A look compares the counter of every tensor: with very many of them it takes its time, and comes less often.
LOOK_PART_MAX = 0.1
#: Chunks on devices are brought and digested in batches.
FIRST_BATCH_BYTES = 4 << 20
BATCH_BYTES_MAX = 128 << 20
#: Names listed in an error; the rest is counted.
NAMES_SHOWN_MAX = 8


@dataclass(slots=True)
class Publication:
    """One publish of one holding. `counters` are the tensors' write counters as they were when it was called."""

    holding: Holding
    where: Where
    offload: Offload
    counters: list[int | None]
    #: Where the publisher's streams were when it called; None where it uses none.
    mark: Mark | None = None
    #: Set by the owner to end the job early: nobody needs the rest.
    stopped: bool = False
    #: Set once everything may be read.
    root: Digest | None = None
    #: What the publisher hears at its next call: it wrote meanwhile, others published something else, a device did not
    #: come to the copies, or the digests failed as they never should.
    broken: ContractBroken | VersionConflict | EngineUnavailable | Broken | None = None

    async def run(self, *, digests: bool) -> Digest | None:
        """Make everything readable, in order; the root digest, or None when stopped early.

        `ContractBroken`, also kept in `broken`, when a tensor was written to or given other memory before its chunk
        was digested: the watermark then stays below it. `EngineUnavailable`, kept alike, when a device is stuck.
        """
        await self.offload.run(self.holding.buffers.stage)
        feed = self._feed()
        try:
            return await self._run(feed, digests=digests)
        finally:
            if feed is not None:
                await self.offload.run(feed.close)

    async def _run(self, feed: Feed | None, *, digests: bool) -> Digest | None:
        ends = self.holding.manifest.chunk_ends
        if not digests:
            if feed is not None:
                with self._kept():
                    if not await self.offload.run(lambda: feed.reach(len(ends), len(ends))):
                        return None
            self._check_counters()
            self.holding.raise_to(len(ends))
            self.root = UNVERIFIED
            return self.root
        if len(ends):
            await (self._digest() if feed is None else self._digest_fed(feed))
        if self.holding.watermark < len(ends):
            return None
        self.root = root_digest(self.holding.manifest.digest, self.holding.digests)
        return self.root

    async def _digest(self) -> None:
        """Every chunk, in one piece of work that needs the interpreter for nothing; this loop looks how far it is."""
        loop = asyncio.get_running_loop()
        manifest, digests = self.holding.manifest, self.holding.digests
        runs = self.holding.memory.chunk_runs(manifest.chunk_starts, manifest.chunk_ends)
        progress = np.zeros(native.PROGRESS_WORDS, dtype=np.uint64)
        work = asyncio.ensure_future(_tried(self.offload.run(lambda: native.digest_runs(*runs, digests, progress))))
        pause_s, shown, beaten = LOOK_S, self.holding.watermark, loop.time()
        try:
            while not work.done() and not self.stopped:
                await asyncio.wait([work], timeout=pause_s)
                began = loop.time()
                self._show(int(progress[0]))
                if self.holding.watermark > shown:
                    shown, beaten = self.holding.watermark, began
                elif began - beaten > BEAT_S and not self.stopped:
                    self.holding.beat()
                    beaten = began
                pause_s = max(LOOK_S, (loop.time() - began) / LOOK_PART_MAX)
        finally:
            progress[1] = 1  # the tensors are the publisher's again when this returns: nobody reads them any more
            await asyncio.wait([work])
        if (failure := work.result()) is not None:
            raise failure

    def _show(self, chunks: int) -> None:
        """So many chunks may be read, if nothing was written to meanwhile."""
        if chunks > self.holding.watermark and not self.stopped:
            self._check_counters()
            self.holding.raise_to(chunks)

    async def _digest_fed(self, feed: Feed) -> None:
        """The same where chunks lie on devices, wholly or in part: batch by batch, the next one on its way."""
        ends, start = self.holding.manifest.chunk_ends, 0
        batch_bytes = max(FIRST_BATCH_BYTES, feed.batch_bytes_min)
        while start < len(ends) and not self.stopped:
            stop = self._batch(start, batch_bytes)
            with self._kept():
                reached = await self.offload.run(
                    _digest_span(self.holding, start, stop, feed, self._batch(stop, batch_bytes))
                )
            if not reached:
                return
            self._show(stop)
            start, batch_bytes = stop, min(batch_bytes * 2, BATCH_BYTES_MAX)

    def _batch(self, start: int, batch_bytes: int) -> int:
        """Where a batch from chunk `start` on ends: after so many bytes at most, one chunk at least if there is one."""
        ends = self.holding.manifest.chunk_ends
        begin = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, begin + batch_bytes, side="right"))
        return min(max(stop, start + 1), len(ends))

    def _feed(self) -> Feed | None:
        """The copies from devices; None when there are none to make."""
        on_device = self.holding.buffers.on_device
        if on_device is None:
            return None
        mark, self.mark = self.mark, None  # it holds memory until it has been copied
        return on_device.feed(mark or on_device.mark(gather=True), lambda: self.stopped)

    def _check_counters(self) -> None:
        """`check`, but for tensors of which a snapshot is served: what is written to them changes nothing."""
        with self._kept():
            self.holding.buffers.check_large_in_place(self.where)
        if self.holding.buffers.counters() != self.counters:
            self.check()

    def check(self) -> None:
        """Raise `ContractBroken` naming each tensor written to or given other memory since the publish was called."""
        with self._kept():
            self.holding.buffers.check_in_place(self.where)
        if changed := self.holding.buffers.changed(self.counters):
            shown = ", ".join(repr(name) for name in changed[:NAMES_SHOWN_MAX])
            more = f" and {len(changed) - NAMES_SHOWN_MAX} more" if len(changed) > NAMES_SHOWN_MAX else ""
            self.broken = ContractBroken(
                f"{shown}{more} written to while published; call unpublish() before writing to a published tensor",
                Where(tensor=changed[0]).over(self.where),
            )
            raise self.broken

    def raise_if_broken(self, readers: tuple[str, ...], where: Where) -> None:
        """After its end: what its publisher has to hear; `readers` are those that may have read what it spoiled."""
        if self.broken is None:
            with suppress(ContractBroken):
                self.check()
        if isinstance(self.broken, ContractBroken):
            who = f"; it was read by {', '.join(readers)}" if readers else "; nobody read it"
            raise ContractBroken(self.broken.message + who, self.broken.where.over(where))
        if self.broken is not None:
            raise self.broken.at(where)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """What breaks the contract, or a device that is stuck, is heard at the publisher's next call."""
        try:
            yield
        except (ContractBroken, EngineUnavailable) as broken:
            broken.at(self.where)
            self.broken = broken
            raise


def _digest_span(holding: Holding, start: int, stop: int, feed: Feed, ahead: int) -> Callable[[], bool]:
    """Work that brings a span of chunks from devices and digests it, with what follows below `ahead` on its way.

    False when the publisher gave up meanwhile.
    """

    def digest() -> bool:
        if not feed.reach(stop, ahead):
            return False
        feed.digest(start, stop, holding.digests[start:stop])
        return True

    return digest


async def _tried(work: Awaitable[object]) -> Exception | None:
    """Its failure as a value: a process that just ends looks at no task any more, and must not be told of one."""
    try:
        await work
    except Exception as failure:  # noqa: BLE001 - whoever waits for it raises it
        return failure
    return None
