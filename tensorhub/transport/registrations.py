"""What a transfer library must see registered: disjoint regions, made of ranges that may overlap, touch and repeat.

Decides which regions are given to the library and taken back; a second or overlapping registration is impossible by
construction. Calls the library through the two functions it is given; touches no memory.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tensorhub.errors import BadRequest, EngineUnavailable, NotRegistered
from tensorhub.transport.ranges import ADDRESS_MAX


@dataclass(slots=True)
class _Region:
    """One registration of the library: bytes [start, end), from its first range to its last."""

    start: int
    end: int
    #: {(address, nbytes): how often it is registered}, never 0.
    ranges: Counter[tuple[int, int]] = field(default_factory=Counter)
    #: Whether the library has it: not if it refused to take it back after a failure.
    is_given: bool = False


class Registrations:
    """Counted ranges, given to a library as the regions that one read may span.

    Libraries serve a read from one region only. Ranges whose ends lie in the same or in neighbouring grains share one:
    with a grain of one byte, those that overlap or touch; with a grain of a page, those, too, between which there is
    nothing but bytes of their own pages, which are mapped as they are. A range that joins regions, or whose end splits
    one, makes the library take back and give anew; a read by a peer in that instant fails, and its engine asks again
    (`transport/mooncake_read.py`).
    """

    def __init__(self, give: Callable[[int, int], None], take_back: Callable[[int], None], grain: int = 1) -> None:
        self._give, self._take_back, self._grain = give, take_back, grain
        #: Guards everything below: buffers are registered in any thread. A queue would need a thread to serve it.
        self._lock = threading.Lock()
        #: By start; disjoint, at least one whole grain between any two.
        self._regions: list[_Region] = []

    def regions(self) -> list[tuple[int, int]]:
        """(address, nbytes) of every region, rising."""
        with self._lock:
            return [(region.start, region.end - region.start) for region in self._regions]

    def add(self, address: int, nbytes: int) -> None:
        """Cover one more range. What `give` raises leaves everything as it was."""
        if nbytes <= 0 or address <= 0 or address + nbytes > ADDRESS_MAX:
            raise BadRequest(f"cannot register {nbytes} bytes at {address:#x}: not a range of memory")
        with self._lock:
            first, stop = self._touching(address, address + nbytes)
            old = self._regions[first:stop]
            if len(old) == 1 and old[0].start <= address and address + nbytes <= old[0].end:
                old[0].ranges[address, nbytes] += 1
                return
            start = min([address, *(region.start for region in old)])
            end = max([address + nbytes, *(region.end for region in old)])
            largest = max((region.ranges for region in old), key=len, default=Counter[tuple[int, int]]())
            merged = _Region(start, end)
            self._replace(old, [merged])
            for region in old:
                if region.ranges is not largest:
                    largest.update(region.ranges)  # the smaller into the larger: n ranges in a row cost O(n log n)
            largest[address, nbytes] += 1
            merged.ranges = largest
            self._regions[first:stop] = [merged]

    def remove(self, address: int, nbytes: int) -> None:
        """Undo one `add`; bytes that no range covers any more are taken back."""
        with self._lock:
            at = bisect.bisect_right(self._regions, address, key=lambda region: region.start) - 1
            region = self._regions[at] if at >= 0 else None
            if region is None or region.ranges[address, nbytes] == 0:
                raise NotRegistered(
                    f"{nbytes} bytes at {address:#x} are not registered; deregister what was registered"
                )
            region.ranges[address, nbytes] -= 1
            if region.ranges[address, nbytes]:
                return
            del region.ranges[address, nbytes]
            left = _split(region.ranges, self._grain)
            if [(piece.start, piece.end) for piece in left] != [(region.start, region.end)]:
                self._replace([region], left)
                self._regions[at : at + 1] = left

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether one region holds every byte."""
        with self._lock:
            at = bisect.bisect_right(self._regions, address, key=lambda region: region.start) - 1
            return at >= 0 and self._regions[at].is_given and address + nbytes <= self._regions[at].end

    def clear(self) -> None:
        """Take everything back; idempotent."""
        with self._lock:
            while self._regions:
                self._end(self._regions.pop())

    def _touching(self, start: int, end: int) -> tuple[int, int]:
        grain = self._grain
        first = bisect.bisect_left(self._regions, start // grain - 1, key=lambda region: (region.end - 1) // grain)
        stop = bisect.bisect_right(self._regions, (end - 1) // grain + 1, key=lambda region: region.start // grain)
        return first, max(first, stop)

    def _replace(self, old: list[_Region], new: list[_Region]) -> None:
        """Exchange regions at the library, or give it the old ones again and raise its error."""
        for region in old:
            self._end(region)
        try:
            for region in new:
                self._begin(region)
        except BaseException:
            for region in new:
                self._end(region)
            for region in old:
                with contextlib.suppress(EngineUnavailable):  # the first refusal is the one to tell
                    self._begin(region)
            raise

    def _begin(self, region: _Region) -> None:
        self._give(region.start, region.end - region.start)
        region.is_given = True

    def _end(self, region: _Region) -> None:
        if region.is_given:
            region.is_given = False
            self._take_back(region.start)


def _split(ranges: Counter[tuple[int, int]], grain: int) -> list[_Region]:
    """The regions of ranges that shared one."""
    found: list[_Region] = []
    for address, nbytes in sorted(ranges):
        if found and address // grain <= (found[-1].end - 1) // grain + 1:
            found[-1].end = max(found[-1].end, address + nbytes)
        else:
            found.append(_Region(address, address + nbytes))
        found[-1].ranges[address, nbytes] = ranges[address, nbytes]
    return found
