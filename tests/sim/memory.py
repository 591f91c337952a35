"""The data plane: the memory engine, made slow, unreliable and untruthful, and torn at every place it can be.

It decides what happens to one read; which reads are meddled with, the faults say. A read takes time and lands piece
by piece, so that whatever else happens meanwhile is seen by half of it. Dead memory is unreadable.
"""

from __future__ import annotations

import asyncio
import ctypes
import enum
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tensorhub.errors import Closed, EngineUnavailable, SourceFailed
from tensorhub.ports import Chunks, Ranges
from tensorhub.transport.landing import digest_landed
from tensorhub.transport.memory import MemoryEngine
from tensorhub.transport.ranges import check_ranges, slices
from tests.sim.marks import Mark, Marks

if TYPE_CHECKING:
    from tests.sim.process import Process

#: Reads up to this size are progress blocks, maps and manifests.
SMALL_BYTES = 2048
LATENCY_S = 0.0002
#: How fast a world's links are: a shard takes a tenth of a second, or some seconds.
BYTES_PER_S = (4e6, 1e6, 0.25e6)


class Meddling(enum.Enum):
    """What may happen to a read."""

    SLOW = "slow"
    STALL = "stall"
    FAIL = "fail"
    UNREACHABLE = "unreachable"
    DO_NOTHING = "do nothing"
    TRUNCATE = "truncate"
    FLIP = "flip"
    SWAP = "swap"
    NO_DIGESTS = "no digests"


#: Reported as a success.
LIES = (Meddling.DO_NOTHING, Meddling.TRUNCATE, Meddling.FLIP, Meddling.SWAP, Meddling.NO_DIGESTS)


@dataclass(frozen=True, slots=True)
class Rule:
    """Reads by this replica (any for "") are meddled with, each with this probability."""

    meddling: Meddling
    replica: str
    probability: float
    #: Duration of a stall; factor of slowness.
    amount: float
    #: Only reads from this replica (any for "").
    source: str = ""
    #: Progress blocks, maps and manifests are read truthfully: a relay lies about weights, not about itself.
    weights_only: bool = False


@dataclass(eq=False)
class Link:
    """A host's way to the others: what goes up waits for what went up before, and so downwards."""

    bytes_per_s: float
    up_free_s: float = 0.0
    down_free_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reading:
    """A read in flight. `lapses` are those of the reader's lease when it began."""

    reader: Process
    source: Process
    nbytes: int
    lapses: int


class DataPlane:
    """All engines of a world, and the reads between them."""

    def __init__(self, rng: random.Random, marks: Marks) -> None:
        self.marks = marks
        self.rules: list[Rule] = []
        self.reading: dict[int, Reading] = {}
        self.rng = rng
        self.bytes_per_s = rng.choice(BYTES_PER_S)
        #: {replica: its link}; who has none has all of `bytes_per_s` for each of its reads.
        self.links: dict[str, Link] = {}
        #: {process: bytes of weights and their digests that it has asked for}.
        self.asked: dict[Process, int] = {}
        #: {process: how many of these did not come, or came wrong, or were not waited for}.
        self.wasted: dict[Process, int] = {}
        #: Processes that were told of a success that was none.
        self.lied_to: dict[Process, int] = {}
        self._engines: dict[bytes, SimEngine] = {}
        self._last = 0

    def add(self, engine: SimEngine) -> None:
        self._engines[engine.locate()] = engine

    def at(self, peer: bytes) -> SimEngine:
        return self._engines[peer]

    def begin(self, reading: Reading) -> int:
        self._last += 1
        self.reading[self._last] = reading
        return self._last

    def draw(self, reader: Process, source: Process, nbytes: int) -> Rule | None:
        """What happens to the next read of this process."""
        for rule in self.rules:
            concerned = rule.replica in ("", reader.seat.replica) and rule.source in ("", source.seat.replica)
            if concerned and not (rule.weights_only and nbytes <= SMALL_BYTES) and self.rng.random() < rule.probability:
                return rule
        return None

    def passage_s(self, reader: Process, source: Process, nbytes: int) -> float:
        """How long so many bytes take from one process to another, in the order in which they were asked for."""
        up, down = self.links.get(source.seat.replica), self.links.get(reader.seat.replica)
        if nbytes <= SMALL_BYTES or (up is None and down is None):
            slowest = min([self.bytes_per_s, *(link.bytes_per_s for link in (up, down) if link is not None)])
            return LATENCY_S + nbytes / slowest
        now_s = asyncio.get_running_loop().time()
        there_s = now_s
        if up is not None:
            there_s = up.up_free_s = max(now_s, up.up_free_s) + nbytes / up.bytes_per_s
        if down is not None:
            down.down_free_s = max(now_s, down.down_free_s) + nbytes / down.bytes_per_s
            there_s = max(there_s, down.down_free_s)
        return LATENCY_S + there_s - now_s


class SimEngine:
    """`ports.Engine` of one process."""

    name = "memory"

    def __init__(self, plane: DataPlane, process: Process) -> None:
        self.process = process
        self._plane = plane
        self._inner = MemoryEngine()
        self._dead = False
        plane.add(self)

    def locate(self) -> bytes:
        return self._inner.locate()

    def reaches(self, peer: bytes) -> str | None:
        return self._inner.reaches(peer)

    def register(self, address: int, nbytes: int) -> None:
        if not self._dead:
            self._inner.register(address, nbytes)

    def deregister(self, address: int, nbytes: int) -> None:
        if not self._dead:
            self._inner.deregister(address, nbytes)

    async def close(self) -> None:
        """The process is gone, or says goodbye: nothing of it can be read any more."""
        self._dead = True
        await self._inner.close()

    async def read(self, peer: bytes, ranges: Ranges, timeout_s: float, chunks: Chunks | None = None) -> None:
        if self._dead:
            raise Closed("this engine is closed")
        check_ranges(ranges)
        plane, nbytes = self._plane, ranges.total_bytes
        source = plane.at(peer)
        number = plane.begin(Reading(self.process, source.process, nbytes, self.process.session.lapses))
        if nbytes > SMALL_BYTES:
            plane.asked[self.process] = plane.asked.get(self.process, 0) + nbytes
        is_well = False
        try:
            meddling = await self._read(source, ranges, nbytes, timeout_s)
            if chunks is not None and meddling is not Meddling.NO_DIGESTS:
                digest_landed(ranges, chunks)
            is_well = meddling not in LIES
        finally:
            del plane.reading[number]
            if nbytes > SMALL_BYTES and not is_well:
                plane.wasted[self.process] = plane.wasted.get(self.process, 0) + nbytes
        if nbytes > SMALL_BYTES:
            for shown in (self.process, source.process):
                if shown.is_filling:
                    shown.world.checkers.served(shown)
            if source.process.is_filling:
                plane.marks.hit(Mark.PARTIAL_SERVED)

    async def _read(self, source: SimEngine, ranges: Ranges, nbytes: int, timeout_s: float) -> Meddling | None:
        plane = self._plane
        rule = plane.draw(self.process, source.process, nbytes)
        meddling = None if rule is None else rule.meddling
        spent_s = plane.passage_s(self.process, source.process, nbytes)
        match meddling:
            case Meddling.FAIL:
                await asyncio.sleep(LATENCY_S)
                raise SourceFailed("the transport failed")
            case Meddling.UNREACHABLE:
                raise EngineUnavailable("no route to the source")
            case Meddling.SLOW if rule is not None:
                spent_s *= rule.amount
            case Meddling.STALL if rule is not None:
                spent_s += rule.amount
        if spent_s > timeout_s:
            await asyncio.sleep(timeout_s)
            raise SourceFailed(f"a read was not done within {timeout_s:g} s")
        if meddling in LIES:
            plane.lied_to[self.process] = plane.lied_to.get(self.process, 0) + 1
        match meddling:
            case Meddling.DO_NOTHING:
                await asyncio.sleep(spent_s)
            case Meddling.TRUNCATE:
                piece = next(slices(ranges, plane.rng.randint(1, nbytes)))
                await self._land(source, piece, piece.total_bytes, spent_s)
            case Meddling.SWAP:
                await self._land(source, ranges, nbytes, spent_s)
                _swap(ranges, plane.rng)
            case Meddling.FLIP:
                await self._land(source, ranges, nbytes, spent_s)
                _flip(ranges, plane.rng)
            case _:
                await self._land(source, ranges, nbytes, spent_s)
        return meddling

    async def _land(self, source: SimEngine, ranges: Ranges, nbytes: int, spent_s: float) -> None:
        """The bytes as they are when they are read, spread over its time in pieces of any size."""
        if nbytes <= SMALL_BYTES:
            await asyncio.sleep(spent_s)
            self._copy(source, ranges)
            return
        piece_bytes = self._plane.rng.randint(nbytes // 4 + 1, nbytes)
        for piece in slices(ranges, piece_bytes):
            await asyncio.sleep(spent_s * min(1.0, piece_bytes / nbytes))
            self._copy(source, piece)

    def _copy(self, source: SimEngine, ranges: Ranges) -> None:
        """As the memory engine does, in one instant: it takes its time and its turns above."""
        if self._dead:
            raise Closed("this engine was closed during a read")
        if source._dead:
            raise SourceFailed("the source's engine is closed")
        source._inner.copy_out(ranges, 0)


def _local(ranges: Ranges, i: int) -> np.ndarray:
    """The memory in which range i landed."""
    nbytes = int(ranges.nbytes[i])
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(int(ranges.local[i])))


def _flip(ranges: Ranges, rng: random.Random) -> None:
    landed = _local(ranges, rng.randrange(len(ranges.nbytes)))
    landed[rng.randrange(len(landed))] ^= 1 << rng.randrange(8)


def _swap(ranges: Ranges, rng: random.Random) -> None:
    """Two halves of a range that trade places: what reordered packets look like."""
    landed = _local(ranges, rng.randrange(len(ranges.nbytes)))
    half = len(landed) // 2
    first = landed[:half].copy()
    landed[:half] = landed[half : 2 * half]
    landed[half : 2 * half] = first
