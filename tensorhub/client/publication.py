"""The background half of a publish: stage, digest, raise the watermark; notice a publisher that writes meanwhile.

What lies on devices is copied to staging one batch ahead of the digests, from the point in the caller's streams at
which it called.

It decides how far readers may read, chunk by chunk, and says at the end what the version's root digest is. It never
talks to the server and never touches the tensors' contents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tensorhub import native
from tensorhub.client.holding import Holding
from tensorhub.errors import ContractBroken, EngineUnavailable, VersionConflict, Where
from tensorhub.pipeline.digest import root_digest
from tensorhub.ports import Offload
from tensorhub.types import UNVERIFIED, Digest

if TYPE_CHECKING:
    from tensorhub.client.on_device import Feed, Mark

#: The first batch is small, so that readers can start at once. The next is twice as large whenever the hand-over
#: between two batches took more than the given part of a batch: a trainer that holds the interpreter lock makes hand-
#: overs slow, and the second limit bounds how long readers then wait for one batch.
FIRST_BATCH_BYTES = 4 << 20
HANDOVER_PART_MAX = 0.1
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
    #: What the publisher hears at its next call: it wrote meanwhile, others published something else, or a device did
    #: not come to the copies.
    broken: ContractBroken | VersionConflict | EngineUnavailable | None = None

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
        loop = asyncio.get_running_loop()
        start, batch_bytes = 0, max(FIRST_BATCH_BYTES, feed.batch_bytes_min if feed is not None else 0)
        began = loop.time()
        while start < len(ends) and not self.stopped:
            stop = self._batch(start, batch_bytes)
            with self._kept():
                digest_s = await self.offload.run(
                    _digest_span(self.holding, start, stop, feed, self._batch(stop, batch_bytes), loop.time)
                )
            if self.stopped or digest_s is None:
                return None
            self._check_counters()
            self.holding.raise_to(stop)
            whole_s, began, start = loop.time() - began, loop.time(), stop
            if whole_s - digest_s > HANDOVER_PART_MAX * digest_s:
                batch_bytes = min(batch_bytes * 2, BATCH_BYTES_MAX)
        if start < len(ends):
            return None
        self.root = root_digest(self.holding.manifest.digest, self.holding.digests)
        return self.root

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

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """What breaks the contract, or a device that is stuck, is heard at the publisher's next call."""
        try:
            yield
        except (ContractBroken, EngineUnavailable) as broken:
            broken.at(self.where)
            self.broken = broken
            raise


def _digest_span(
    holding: Holding, start: int, stop: int, feed: Feed | None, ahead: int, clock: Callable[[], float]
) -> Callable[[], float | None]:
    """Work that digests a span of chunks and returns the seconds that took; None when the publisher gave up meanwhile.

    `clock` is the loop's, so that a simulated publisher decides by simulated time alone.

    What the span has on devices is brought first, and what lies behind it, below `ahead`, is on its way meanwhile.
    """
    manifest, digests = holding.manifest, holding.digests[start:stop]
    runs = holding.memory.chunk_runs(manifest.chunk_starts[start:stop], manifest.chunk_ends[start:stop])

    def digest() -> float | None:
        began = clock()
        if feed is None:
            native.digest_runs(*runs, digests)
        elif feed.reach(stop, ahead):
            feed.digest(start, stop, digests)
        else:
            return None
        return clock() - began

    return digest
