"""What a buffer set has on devices, and the copies that a publish and a replicate make of it.

Decides which bytes cross when: at a publish from the device to pinned staging memory, one batch ahead of the digests;
at a replicate back to the device while the rest still arrives. It never chooses what is staged (`compaction.py`), and
knows devices only by `devices.py`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch

from tensorhub import native
from tensorhub.client.devices import CALLER_WAIT_S, COPY_WAIT_S, Device, Event, Lane, Pair, is_flat, wait
from tensorhub.client.moves import Moves
from tensorhub.pipeline.device_digest import SHORT_BYTES_MAX
from tensorhub.pipeline.manifest import Manifest
from tensorhub.pipeline.memory_map import MemoryMap
from tensorhub.ports import U64

#: A digest on a device walks a chunk's blocks in sequence, and all chunks of a call side by side: few chunks a call
#: leave the device idle.
DIGEST_BATCH_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Stream bytes [start, stop): one large tensor on a device."""

    start: int
    stop: int
    device: Device
    #: Its elements: flat bytes if contiguous, else integers under its strides.
    raw: torch.Tensor
    #: Where they are staged; None where engines read the device's memory itself.
    area: torch.Tensor | None

    def part(self, start: int, stop: int, *, whole_early: bool) -> Pair | None:
        """What to copy of stream bytes [start, stop). A strided tensor goes whole: with its first byte, or its last."""
        if self.area is None:
            return None
        if not is_flat(self.raw):
            is_due = start <= self.start < stop if whole_early else start < self.stop <= stop
            return (self.raw, self.area) if is_due else None
        first, last = max(start, self.start) - self.start, min(stop, self.stop) - self.start
        return self.raw[first:last], self.area[first:last]


@dataclass(frozen=True, slots=True, eq=False)
class Tiny:
    """Tiny tensors of one device: gathered there, crossing as one copy to and from `area`, side by side."""

    device: Device
    raws: list[torch.Tensor]
    area: torch.Tensor


@dataclass(slots=True, eq=False)
class Lanes:
    """One lane for each device of a registration. All copies of its memory share it, so none overtakes another."""

    _lanes: dict[str, Lane] = field(default_factory=dict)

    def at(self, device: Device) -> Lane:
        if device.name not in self._lanes:
            self._lanes[device.name] = device.lane()
        return self._lanes[device.name]


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """A point in the caller's streams, and what tiny tensors held there. Made in the caller's thread."""

    events: list[Event]
    packed: list[torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class OnDevice:
    """The part of a buffer set that lies on devices, mapped onto one manifest."""

    manifest: Manifest
    memory: MemoryMap
    devices: list[Device]
    lanes: Lanes
    #: Large tensors, in the order of the stream.
    pieces: list[Piece]
    tiny: list[Tiny]
    #: From the tiny tensors' areas to their places in the tiny segment.
    tiny_moves: Moves
    #: At install only: tensors that have memory of their own here, and share it in the version.
    filled: list[tuple[Device, Pair]]

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of memory, besides the host's, whose addresses are in the map."""
        return frozenset(piece.device.kind for piece in self.pieces if piece.area is None)

    def mark(self, *, gather: bool) -> Mark:
        """Where the calling thread's streams are now; with what the tiny tensors hold there if `gather`."""
        packed = [tiny.device.pack(tiny.raws) for tiny in self.tiny] if gather else []
        return Mark([device.mark() for device in self.devices], packed)

    def feed(self, mark: Mark, gives_up: Callable[[], bool]) -> Feed:
        """The copies of a publish."""
        return Feed(self, mark, gives_up)

    def delivery(self, mark: Mark, left_s: Callable[[], float]) -> Delivery:
        """The copies of a replicate, which has so many seconds left."""
        return Delivery(self, mark, left_s)

    def marks(self) -> list[tuple[Device, Event]]:
        """Where the lanes are now."""
        return [(device, self.lanes.at(device).mark()) for device in self.devices]

    def parts(self, start: int, stop: int, *, whole_early: bool) -> Iterator[tuple[Device, Pair]]:
        """What is staged of stream bytes [start, stop); see `Piece.part`."""
        for piece in self._touching(start, stop):
            if (pair := piece.part(start, stop, whole_early=whole_early)) is not None:
                yield piece.device, pair

    def digest(self, first: int, stop: int, out: U64) -> None:
        """XXH3-64 of chunks [first, stop) where they lie; each is wholly on one side. Waits for the devices' part."""
        starts, ends = self.manifest.chunk_starts, self.manifest.chunk_ends
        on_host = np.ones(stop - first, dtype=np.bool_)
        found: list[tuple[slice, torch.Tensor]] = []
        for piece in self._touching(int(starts[first]), int(ends[stop - 1])):
            if piece.area is not None:
                continue
            begin = max(first, int(np.searchsorted(starts, piece.start)))
            end = min(stop, int(np.searchsorted(starts, piece.stop)))
            on_host[begin - first : end - first] = False
            found += self._digest_piece(piece, begin, end, first)
        if on_host.any():
            landed = np.zeros(int(on_host.sum()), dtype=np.uint64)
            native.digest_runs(*self.memory.chunk_runs(starts[first:stop][on_host], ends[first:stop][on_host]), landed)
            out[on_host] = landed
        wait(self.marks() if found else [], _never, COPY_WAIT_S)
        for place, digests in found:
            out[place] = _values(digests)

    def _digest_piece(self, piece: Piece, begin: int, end: int, first: int) -> list[tuple[slice, torch.Tensor]]:
        """Digests of chunks [begin, end) of a piece, all but the last equally long, and their places behind `first`."""
        lane = self.lanes.at(piece.device)
        starts, ends = self.manifest.chunk_starts, self.manifest.chunk_ends
        sizes = (ends[begin:end] - starts[begin:end]).tolist()
        found: list[tuple[slice, torch.Tensor]] = []
        equal = sum(1 for size in sizes if size == sizes[0])
        for count, at in ((equal, begin), (len(sizes) - equal, begin + equal)):
            if not count:
                continue
            size, offset = sizes[at - begin], int(starts[at]) - piece.start
            rows = piece.raw[offset : offset + count * size].view(count, size)
            place = slice(at - first, at - first + count)
            if size > SHORT_BYTES_MAX:
                found.append((place, lane.digest(rows)))
            else:  # another path of XXH3, for the host
                landed = piece.device.pin(count * size)
                lane.fetch([(rows.view(-1), landed)])
                found.append((place, landed.view(count, size)))
        return found

    def _touching(self, start: int, stop: int) -> Sequence[Piece]:
        """Pieces with bytes in [start, stop)."""
        low = bisect_right(self.pieces, start, key=_stop_of)
        high = bisect_left(self.pieces, stop, key=_start_of)
        return self.pieces[low:high]


class Feed:
    """A publish: brings staged bytes from devices, and digests chunks where they lie. For one worker thread."""

    def __init__(self, on: OnDevice, mark: Mark, gives_up: Callable[[], bool]) -> None:
        self._on = on
        #: Dropped, with the memory of the packed tensors, once they have been copied.
        self._mark: Mark | None = mark
        self._gives_up = gives_up
        self._begun = 0
        #: (first chunk of a span whose copies are under way, the lanes' marks behind them), oldest first.
        self._running: deque[tuple[int, list[tuple[Device, Event]]]] = deque()

    @property
    def batch_bytes_min(self) -> int:
        """Smaller batches leave a device idle."""
        return DIGEST_BATCH_BYTES if self._on.kinds else 0

    def reach(self, stop: int, ahead: int) -> bool:
        """Return when all chunks below `stop` can be read, with those below `ahead` on their way.

        False when the caller gave up before; `EngineUnavailable` when a device does not come to it.
        """
        mark = self._mark
        if mark is not None:
            if not wait(zip(self._on.devices, mark.events, strict=True), self._gives_up, CALLER_WAIT_S):
                return False
            for tiny, packed in zip(self._on.tiny, mark.packed, strict=True):
                self._on.lanes.at(tiny.device).fetch([(packed, tiny.area)])
        self._begin(stop)
        self._begin(ahead)
        while self._running and self._running[0][0] < stop:
            wait(self._running[0][1], _never, COPY_WAIT_S)
            self._running.popleft()
        if mark is not None:
            self._on.tiny_moves.run()
            self._mark = None
        return True

    def digest(self, first: int, stop: int, out: U64) -> None:
        """Digests of chunks that have been reached."""
        self._on.digest(first, stop, out)

    def close(self) -> None:
        """Return when no copy is under way any more: staging may be filled by others."""
        wait(self._on.marks(), _never, COPY_WAIT_S)

    def _begin(self, stop: int) -> None:
        """Enqueue the copies of all chunks below `stop`."""
        if stop <= self._begun:
            return
        begin, end = int(self._on.manifest.chunk_starts[self._begun]), int(self._on.manifest.chunk_ends[stop - 1])
        for device, pairs in by_device(self._on.parts(begin, end, whole_early=True)):
            self._on.lanes.at(device).fetch(pairs)
        self._running.append((self._begun, self._on.marks()))
        self._begun = stop


class Delivery:
    """A replicate: brings verified bytes to the devices. For one worker thread at a time."""

    def __init__(self, on: OnDevice, mark: Mark, left_s: Callable[[], float]) -> None:
        self._on = on
        #: Dropped once the caller's streams have passed it.
        self._mark: Mark | None = mark
        self._left_s = left_s
        self._done = 0

    def begin(self) -> None:
        """Return when the caller's work on the tensors is over: only then may a byte be written to their devices."""
        if self._mark is not None:
            wait(zip(self._on.devices, self._mark.events, strict=True), _never, self._left_s())
            self._mark = None

    def reach(self, watermark: int) -> None:
        """Chunks below `watermark` are verified: their bytes set out."""
        self.begin()
        if watermark <= self._done:
            return
        starts, ends = self._on.manifest.chunk_starts, self._on.manifest.chunk_ends
        begin, end = int(starts[self._done]), int(ends[watermark - 1])
        for device, pairs in by_device(self._on.parts(begin, end, whole_early=False)):
            self._on.lanes.at(device).deliver(pairs)
        self._done = watermark

    def digest(self, first: int, stop: int, out: U64) -> None:
        """Digests of chunks [first, stop) that have landed."""
        self._on.digest(first, stop, out)

    def finish(self) -> None:
        """After `install`: bring the rest; return when every byte is on its device, for whichever stream comes next."""
        self.reach(self._on.manifest.chunks)
        for tiny in self._on.tiny:
            self._on.lanes.at(tiny.device).unpack(tiny.raws, tiny.area)
        for device, pairs in by_device(self._on.filled):
            self._on.lanes.at(device).deliver(pairs)
        self.close()

    def close(self) -> None:
        """Return when no copy is under way any more."""
        wait(self._on.marks(), _never, COPY_WAIT_S)


def by_device(pairs: Iterable[tuple[Device, Pair]]) -> Iterator[tuple[Device, list[Pair]]]:
    """Pairs in a row that are of one device, together: entering a stream costs more than a copy."""
    for _, group in groupby(pairs, key=lambda item: item[0].name):
        found = list(group)
        yield found[0][0], [pair for _, pair in found]


def _values(digests: torch.Tensor) -> U64:
    """Digests that came from a device; or bytes, whose digests are computed here."""
    if digests.dtype == torch.int64:
        return digests.numpy().view(np.uint64)
    return np.array([native.digest(row.data_ptr(), row.nbytes) for row in digests], dtype=np.uint64)


def _never() -> bool:
    return False


def _start_of(piece: Piece) -> int:
    return piece.start


def _stop_of(piece: Piece) -> int:
    return piece.stop
