"""One read over Mooncake, as a thread carries it out: requests in flight, what lands, and what a failure means.

Decides when a byte goes into caller's memory: over protocols whose failed requests may still write (TCP) only by our
own copy out of a slab, so that nothing late can; over the others the device writes there, and the read ends only when
it has ended. Blocks; knows no event loop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorhub import native
from tensorhub.addresses import PORT_MAX, Address
from tensorhub.errors import Closed, SourceFailed, TensorHubError, Where
from tensorhub.ports import Chunks, Ranges
from tensorhub.transport.bounce import SLAB_BYTES, Slab
from tensorhub.transport.locators import malformed, packed, unpacked
from tensorhub.transport.mooncake_library import CELL_BYTES, Library, cell_of
from tensorhub.transport.ranges import slices
from tensorhub.transport.windows import REQUESTS_MAX, Window, apart, windows

#: Windows that one read keeps in flight: the next one lands while one is copied and digested.
WINDOWS_IN_FLIGHT = 4
#: Between two looks at what is in flight, the longer the longer nothing ends: asking costs a core, which the
#: transfer needs.
PAUSE_S_MIN, PAUSE_S_MAX = 50e-6, 500e-6
#: Of a request that a live source refused. Each refusal costs a connection, and Mooncake makes no new ones for a second
#: after the last: the first requests after that fail, too.
ATTEMPTS_MAX = 3
#: How long a live process may take to say who it is, by one read of 64 bytes.
CELL_S = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """What an engine's locator says: one life of one process, and how Mooncake reaches it."""

    boot: str
    address: Address
    protocol: str
    incarnation: bytes
    #: Address of its incarnation cell.
    cell: int

    def pack(self) -> bytes:
        return packed([self.boot, self.address.host, self.address.port, self.protocol, self.incarnation, self.cell])

    @classmethod
    def unpack(cls, locator: bytes) -> Place:
        """`EngineUnavailable` for anything but what `pack` makes."""
        found: dict[str, Any] = unpacked(locator, _TYPES)
        address = Address(found.pop("host"), found.pop("port"))
        if not (address.host and address.host.isprintable() and 0 < address.port <= PORT_MAX):
            raise malformed(f"address {address}")
        return cls(address=address, **found)


_TYPES = {"boot": str, "host": str, "port": int, "protocol": str, "incarnation": bytes, "cell": int}


def identify(library: Library, place: Place, name: str, timeout_s: float) -> TensorHubError | None:
    """Why whoever answers at an address is not the process that was located, or None if it is."""
    deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
    for _ in range(ATTEMPTS_MAX):
        status, shown = _read_cell(library, place, name, deadline_ns)
        if status > 0:
            if shown == cell_of(place.incarnation):
                return None
            return SourceFailed(f"the source at {place.address} was restarted: another process has its address now")
        if status == 0:
            return SourceFailed(f"the source at {place.address} did not say who it is within {timeout_s:.3g} s")
        if library.probe(name) != 0:
            return SourceFailed(f"the source at {place.address} is dead: it does not answer any more")
    return SourceFailed(f"the source at {place.address} was restarted, or is ending: it does not show who it is")


def _read_cell(library: Library, place: Place, name: str, deadline_ns: int) -> tuple[int, bytes]:
    """The status of the read at the end, and what it brought."""
    slab = library.slabs.take()
    while slab is None:
        if time.monotonic_ns() >= deadline_ns:
            return 0, b""
        time.sleep(PAUSE_S_MAX)
        slab = library.slabs.take()
    slab.memory[:CELL_BYTES] = 0
    batch = library.submit(name, slab.address, place.cell, CELL_BYTES)
    status = library.status(batch) if batch else -1
    while status == 0 and time.monotonic_ns() < deadline_ns:
        time.sleep(PAUSE_S_MIN)
        status = library.status(batch)
    shown = slab.memory[:CELL_BYTES].tobytes()
    library.slabs.give_back(slab, [batch] if status == 0 else ())
    return status, shown


@dataclass(slots=True, eq=False)
class _Flight:
    """One window under way. Invariant: `batches` are those the library has not reported as ended."""

    window: Window
    #: None where bytes land in the caller's memory.
    slab: Slab | None
    batches: list[int]
    failed: bool = False

    def ended(self, library: Library) -> bool:
        left = []
        for batch in self.batches:
            status = library.status(batch)
            if status == 0:
                left.append(batch)
            elif status < 0:
                self.failed = True
        self.batches = left
        return not left


class Transfer:
    """One read. `run` in a thread; `end` and `abandon` from another."""

    def __init__(
        self,
        library: Library,
        place: Place,
        ranges: Ranges,
        timeout_s: float,
        chunks: Chunks | None,
        *,
        is_direct: bool,
    ) -> None:
        self.is_direct = is_direct
        #: In the order of the batch; for errors.
        self.bytes_done = 0
        self._library, self._place, self._ranges, self._chunks = library, place, ranges, chunks
        self._name = library.peer_name(place.address, place.incarnation)
        self._timeout_s = timeout_s
        self._deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        self._flights: deque[_Flight] = deque()
        self._digested = 0
        self._chunk_ends = np.empty(0, dtype=np.uint64)
        if chunks is not None and len(chunks.digests):
            self._chunk_ends = np.cumsum(ranges.nbytes, dtype=np.uint64)[chunks.firsts[1:].astype(np.int64) - 1]
        #: Told not to go on, before it came to an end of its own.
        self.is_ended = False
        #: Held while caller's memory is written to, so that `abandon` returns when it never is again.
        self._landing = threading.Lock()
        self._is_abandoned = False

    def run(self) -> TensorHubError | None:
        """Move all bytes; what went wrong, or None. Slabs are given back, or quarantined."""
        try:
            self._move()
        except TensorHubError as error:
            return error.at(Where(bytes_done=self.bytes_done))
        finally:
            self._give_up()
        return None

    def end(self) -> None:
        """Do not go on."""
        self.is_ended = True

    def abandon(self) -> None:
        """Return when this read touches caller's memory no more, whatever the library does."""
        self.is_ended = True
        with self._landing:
            self._is_abandoned = True
        if self.is_direct:
            self._library.revoke()

    def left_s(self) -> float:
        return max(0.0, (self._deadline_ns - time.monotonic_ns()) / 1e9)

    def late(self) -> SourceFailed:
        """The deadline has passed."""
        total = self._ranges.total_bytes
        return SourceFailed(
            f"a read of {total} bytes from {self._place.address} was not done within {self._timeout_s} s",
            Where(bytes_done=self.bytes_done),
        )

    def _move(self) -> None:
        coming = self._windows()
        window = next(coming, None)
        pause_s = PAUSE_S_MIN
        while window is not None or self._flights:
            self._check()
            while window is not None and len(self._flights) < WINDOWS_IN_FLIGHT and self._launch(window):
                window = next(coming, None)
            if self._flights and self._flights[0].ended(self._library):
                self._finish(self._flights[0])
                pause_s = PAUSE_S_MIN
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def _windows(self) -> Iterator[Window]:
        if not self.is_direct:
            yield from windows(self._ranges, SLAB_BYTES, self._library.grain)
            return
        through = 0
        for piece in slices(self._ranges, SLAB_BYTES * WINDOWS_IN_FLIGHT):
            for first in range(0, len(piece.nbytes), REQUESTS_MAX):
                part = slice(first, first + REQUESTS_MAX)
                some = Ranges(piece.remote[part], piece.local[part], piece.nbytes[part])
                through += some.total_bytes
                yield Window(some.remote.tolist(), some.local.tolist(), some.nbytes.tolist(), some.local, some, through)

    def _launch(self, window: Window) -> bool:
        slab = None if self.is_direct else self._library.slabs.take()
        if slab is None and not self.is_direct:
            return False
        flight = _Flight(window, slab, [])
        self._flights.append(flight)
        self._submit(flight, window.remote, window.offsets, window.nbytes)
        return True

    def _submit(self, flight: _Flight, remote: list[int], offsets: list[int], nbytes: list[int]) -> None:
        base = flight.slab.address if flight.slab is not None else 0
        for theirs, offset, size in zip(remote, offsets, nbytes, strict=True):
            batch = self._library.submit(self._name, base + offset, theirs, size)
            if batch == 0:
                flight.failed = True
                return
            flight.batches.append(batch)

    def _finish(self, flight: _Flight) -> None:
        """The first window in flight has ended: bring its bytes home."""
        if flight.failed:
            self._ask_again(flight)
        with self._landing:
            if self._is_abandoned:
                raise Closed("an abandoned read went on")
            if flight.slab is not None:
                ranges = flight.window.ranges
                native.copy_ranges(flight.window.at + np.uint64(flight.slab.address), ranges.local, ranges.nbytes)
            self.bytes_done = flight.window.through
            self._digest()
        self._flights.popleft()
        if flight.slab is not None:
            self._library.slabs.give_back(flight.slab)

    def _digest(self) -> None:
        """Digest the chunks that are complete by now: they are in the cache."""
        first, stop = self._digested, int(np.searchsorted(self._chunk_ends, np.uint64(self.bytes_done), "right"))
        if self._chunks is None or stop == first:
            return
        begin, end = int(self._chunks.firsts[first]), int(self._chunks.firsts[stop])
        firsts = self._chunks.firsts[first : stop + 1] - self._chunks.firsts[first]
        native.digest_runs(
            self._ranges.local[begin:end], self._ranges.nbytes[begin:end], firsts, self._chunks.digests[first:stop]
        )
        self._digested = stop

    def _ask_again(self, flight: _Flight) -> None:
        """A window failed. A live source may have been changing its registrations, may have regions of its own making,
        or refused another request on the same connection: each range is asked for again, alone."""
        for _ in range(ATTEMPTS_MAX):
            stranger = identify(self._library, self._place, self._name, min(CELL_S, self.left_s()))
            if stranger is not None:
                self._check()
                raise stranger
            refused = self._ask_apart(flight)
            if refused is None:
                return
        raise SourceFailed(f"the source at {self._place.address} does not serve {refused}: not registered there")

    def _ask_apart(self, flight: _Flight) -> str | None:
        """What failed of a window whose ranges are asked for one by one, or None."""
        for remote, offsets, nbytes in apart(flight.window):
            flight.failed = False
            self._submit(flight, remote, offsets, nbytes)
            while not flight.ended(self._library):
                self._check()
                time.sleep(PAUSE_S_MIN)
            if flight.failed:
                return f"{sum(nbytes)} bytes in {len(nbytes)} ranges, the first at {remote[0]:#x}"
        return None

    def _check(self) -> None:
        if self.is_ended:
            raise Closed("the engine was closed during a read")
        if time.monotonic_ns() >= self._deadline_ns:
            raise self.late()

    def _give_up(self) -> None:
        """Part with what is still in flight. Over direct protocols it must end first."""
        while self._flights:
            flight = self._flights[0]
            ended = flight.ended(self._library)
            if flight.slab is None and not ended and not self._is_abandoned:
                time.sleep(PAUSE_S_MAX)
                continue
            self._flights.popleft()
            if flight.slab is not None:
                self._library.slabs.give_back(flight.slab, flight.batches)
