"""A shard at a source and a place for it at a reader, laid out run by run, and the course that leads from one to the
other. Written without `pipeline/course.py` and `pipeline/plan.py`, so that a mistake there has no twin here.

What the source has not shown yet holds other bytes than it will: whoever reads too early is found out.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from tensorhub import native
from tensorhub.pipeline.counter import Counter
from tensorhub.pipeline.exposure import HEADER_BYTES, Exposure, Header, block_bytes
from tensorhub.pipeline.follow import Filling
from tensorhub.pipeline.manifest import Manifest
from tensorhub.pipeline.memory_map import MemoryMap
from tensorhub.pipeline.source import Source
from tensorhub.ports import Course, Engine, Follower, Ranges
from tensorhub.types import NO_GENERATION, Digest, Generation, SessionId
from tests.conformance.peer import pattern
from tests.support.holders import fresh

#: A hang guard: no test waits for it.
PATIENCE_S = 60.0
#: What is written in memory that nothing may touch.
UNTOUCHED = 0xEE
MANIFEST = Digest(bytes(16))
#: Address and length.
Run = tuple[int, int]


def u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


class Layout:
    """Chunks of given sizes, each cut into at most `cuts` runs with `gap` bytes behind each, from offset 0 on."""

    def __init__(self, sizes: Sequence[int], cuts: int = 1, gap: int = 0) -> None:
        #: Runs of each chunk: offset and length.
        self.runs: list[list[Run]] = []
        at = 0
        for size in sizes:
            bounds = sorted({size * cut // cuts for cut in range(cuts + 1)})
            runs = []
            for start, stop in itertools.pairwise(bounds):
                runs.append((at, stop - start))
                at += stop - start + gap
            self.runs.append(runs)
        self.nbytes = at


class Shard:
    """Chunks in the memory of a source, behind a progress block. Bytes are there only from `reveal` on."""

    def __init__(
        self,
        memory: Any,
        sizes: Sequence[int],
        *,
        cuts: int = 1,
        seed: int = 1,
        digests: bool = True,
        manifest: Digest = MANIFEST,
    ) -> None:
        self._manifest = manifest
        self.memory, self.sizes = memory, list(sizes)
        self.generation, self.session, self._has_digests = Generation(fresh()), SessionId(fresh()), digests
        data = pattern(seed, sum(sizes)).tobytes()
        ends = np.cumsum(sizes).tolist()
        self.chunks = [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        self._digests = np.array([xxhash.xxh3_64_intdigest(chunk) for chunk in self.chunks], dtype=np.uint64)
        self._layout = Layout(sizes, cuts, gap=0 if cuts == 1 else 3)
        self.weights = self._map(self._layout.nbytes)
        self.block = self._map(block_bytes(len(sizes)))
        #: Chunks that are in place.
        self.beats = 0
        self.placed = 0
        self.show(0)

    @property
    def whole(self) -> int:
        return len(self.sizes)

    def source(self, name: str, engine: Engine, *, begun: bool = True) -> Source:
        """What a grant would say of it."""
        exposure = Exposure(self.block, self.whole, 0, 0, 0, 0, 0)
        peer = self.memory.locate()
        return Source(name, engine, peer, exposure, self.session, self.generation, self._manifest, begun)

    def map(self) -> MemoryMap:
        return _map_of(self)

    def runs(self, chunk: int) -> list[Run]:
        return [(self.weights + at, nbytes) for at, nbytes in self._layout.runs[chunk]]

    def reveal(self, stop: int) -> None:
        """Put the bytes of all chunks below `stop` in place, then their digests, then show them."""
        self.put(stop)
        self.show(stop)

    def put(self, stop: int) -> None:
        """Without showing them."""
        if stop > self.placed:
            first = self._layout.runs[self.placed][0][0]
            image = bytearray()
            for chunk in range(self.placed, stop):
                taken = 0
                for at, nbytes in self._layout.runs[chunk]:
                    image.extend(bytes(at - first - len(image)))
                    image += self.chunks[chunk][taken : taken + nbytes]
                    taken += nbytes
            self.memory.poke(self.weights + first, bytes(image))
            if self._has_digests:
                place = self.block + HEADER_BYTES + 8 * self.placed
                self.memory.poke(place, self._digests[self.placed : stop].tobytes())
            self.placed = stop

    def show(self, watermark: int, generation: Generation | None = None) -> None:
        generation = self.generation if generation is None else generation
        self.memory.poke(self.block, self._header(watermark, generation).pack())

    def beat(self) -> None:
        """As a reader does that waits for its own source."""
        self.beats += 1
        self.show(self.placed)

    def withdraw(self) -> None:
        """As `unpublish` does before it returns."""
        self.show(0, NO_GENERATION)

    def become(self, other: Shard) -> None:
        """Taken back, written to and published anew, all of it digested: as a fast owner does within one long read."""
        self.withdraw()
        self.chunks, self._digests, self.placed = other.chunks, other._digests, 0
        self.put(self.whole)
        self.show(self.whole, Generation(fresh()))

    def tear(self) -> None:
        """The header as it never should stay: half of it written."""
        whole = self._header(self.whole, self.generation).pack()
        self.memory.poke(self.block, whole[:88] + bytes(8) + whole[96:])

    def spoil(self, chunk: int, what: str) -> None:
        """One bit of a chunk that is in place, or of its digest."""
        if what == "digest":
            wrong = int(self._digests[chunk]) ^ 1
            self.memory.poke(self.block + HEADER_BYTES + 8 * chunk, wrong.to_bytes(8, "little"))
        else:
            self.memory.poke(self.runs(chunk)[0][0], bytes([self.chunks[chunk][0] ^ 1]))

    def _header(self, watermark: int, generation: Generation) -> Header:
        return Header(self.session, generation, self.whole, watermark, self._manifest, self._has_digests, self.beats)

    def _map(self, nbytes: int) -> int:
        address = int(self.memory.map(nbytes))
        self.memory.register(address, nbytes)
        return address


class Place:
    """Where a reader wants the chunks: buffer, digests, and a progress block of its own."""

    def __init__(self, sizes: Sequence[int], *, cuts: int = 1) -> None:
        self.sizes = list(sizes)
        self._layout = Layout(sizes, cuts, gap=0 if cuts == 1 else 5)
        self._guarded = np.full(self._layout.nbytes, UNTOUCHED, dtype=np.uint8)
        self._block = np.zeros(block_bytes(len(sizes)), dtype=np.uint8)
        self.digests = self._block[HEADER_BYTES:].view(np.uint64)
        self.own = Header(SessionId(fresh()), Generation(fresh()), len(sizes), 0, MANIFEST, digests=True)
        native.store(self.block, self.own.pack())

    @property
    def block(self) -> int:
        return int(self._block.ctypes.data)

    def runs(self, chunk: int) -> list[Run]:
        return [(self._guarded.ctypes.data + at, nbytes) for at, nbytes in self._layout.runs[chunk]]

    def chunk(self, chunk: int) -> bytes:
        """What has landed of it."""
        return b"".join(ctypes.string_at(at, nbytes) for at, nbytes in self.runs(chunk))

    def is_untouched(self, chunk: int) -> bool:
        return set(self.chunk(chunk)) == {UNTOUCHED} and not self.digests[chunk]

    def gaps_are_untouched(self) -> bool:
        taken = np.zeros(self._layout.nbytes, dtype=np.bool_)
        for runs in self._layout.runs:
            for at, nbytes in runs:
                taken[at : at + nbytes] = True
        return bool((self._guarded[~taken] == UNTOUCHED).all())

    def guard(self) -> None:
        """Nothing may land from here on; `is_guarded` tells."""
        self._guarded[:] = UNTOUCHED
        self._snapshot = self._block.tobytes()

    def is_guarded(self) -> bool:
        return bool((self._guarded == UNTOUCHED).all()) and self._block.tobytes() == self._snapshot

    def look(self) -> int | None:
        """The watermark that our own readers see; None when caught half-written."""
        header = Header.unpack(ctypes.string_at(self.block, HEADER_BYTES))
        if header is None:
            return None
        assert header == Header(
            self.own.incarnation, self.own.generation, self.own.chunks, header.watermark, MANIFEST, True
        )
        return header.watermark


class Vessel:
    """A filling of a place, as a pull drives it. Nobody else writes in the place's block."""

    def __init__(self, manifest: Manifest, place: Place, *, fence: Callable[[], None] = lambda: None, stall_s: float):
        self.place, self.shown = place, [0]
        self.filling = Filling(
            manifest,
            _map_of(place),
            place.digests,
            Counter(manifest.chunk_ends),
            self._raise_to,
            self.shown.append,
            fence,
            verified=True,
            own_block=place.block,
            stall_s=stall_s,
        )

    async def fill(self, shard: Shard, engine: Engine, *, name: str = "the source", begun: bool = True) -> None:
        await self.filling.read_from(shard.source(name, engine, begun=begun), shard.map())

    def _raise_to(self, watermark: int) -> None:
        self.shown.append(watermark)
        native.store(self.place.block, replace(self.place.own, watermark=watermark).pack())


def plain(nbytes: int) -> tuple[Manifest, list[int]]:
    """The manifest of one tensor of bytes, and the sizes of its chunks."""
    manifest = Manifest.build(["w"], ["uint8"], [(nbytes,)], [nbytes])
    return manifest, np.diff(manifest.chunk_ends, prepend=np.uint64(0)).tolist()


def _map_of(laid: Shard | Place) -> MemoryMap:
    runs = [run for chunk in range(len(laid.sizes)) for run in laid.runs(chunk)]
    return MemoryMap.tiled([at for at, _ in runs], [nbytes for _, nbytes in runs])


def course(
    shard: Shard, place: Place, numbers: Sequence[int] | None = None, *, verified: bool = True, shows: bool = True
) -> Course:
    """All chunks, or those named, from one to the other."""
    numbers = range(shard.whole) if numbers is None else numbers
    pieces: list[tuple[int, int, int]] = []
    firsts = [0]
    for chunk in numbers:
        pieces += _overlaps(shard.runs(chunk), place.runs(chunk))
        if verified:
            at = HEADER_BYTES + 8 * chunk
            pieces.append((shard.block + at, place.block + at, 8))
        firsts.append(len(pieces))
    remote, local, nbytes = (np.array(column, dtype=np.uint64) for column in zip(*pieces, strict=True))
    return Course(
        Ranges(remote, local, nbytes),
        u64(*firsts),
        u64(*numbers),
        shard.whole,
        verified,
        shard.block,
        shard.generation,
        place.block if shows else 0,
        np.zeros(len(numbers), dtype=np.uint8),
        np.zeros(3, dtype=np.uint64),
    )


def _overlaps(theirs: list[Run], ours: list[Run]) -> list[tuple[int, int, int]]:
    """Two cuts of the same bytes as pieces: address there, address here, length."""
    pieces = []
    theirs, ours = list(theirs), list(ours)
    while theirs:
        (there, left), (here, room) = theirs.pop(0), ours.pop(0)
        nbytes = min(left, room)
        pieces.append((there, here, nbytes))
        if left > nbytes:
            theirs.insert(0, (there + nbytes, left - nbytes))
        if room > nbytes:
            ours.insert(0, (here + nbytes, room - nbytes))
    return pieces


def follow(engine: Engine, peer: bytes, one: Course, stall_s: float = PATIENCE_S) -> asyncio.Future[None]:
    """The engine's part, running."""
    assert isinstance(engine, Follower)
    return asyncio.ensure_future(engine.follow(peer, one, stall_s))


async def until(condition: Callable[[], bool], task: asyncio.Future[Any]) -> None:
    """Let others run until it is so; fails when `task` ends before."""
    while not condition():
        if task.done():
            await task
            raise AssertionError("the task ended before")
        await asyncio.sleep(0)
