"""Ranges of memory as engines need them: well-formed batches, batches cut to size, and what is registered.

Arithmetic on addresses only; touches no memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tensorhub.errors import BadRequest, NotRegistered
from tensorhub.ports import Ranges

U64 = NDArray[np.uint64]

ADDRESS_MAX = 2**64 - 1


def check_ranges(ranges: Ranges) -> None:
    """`BadRequest` unless it is a batch as `ports.Ranges` promises: at least one range, none empty, vectors alike."""
    vectors = (ranges.remote, ranges.local, ranges.nbytes)
    if any(vector.dtype != np.uint64 or vector.ndim != 1 or not vector.flags.c_contiguous for vector in vectors):
        raise BadRequest("the ranges of a read must be contiguous uint64 vectors")
    if not len(ranges.remote) == len(ranges.local) == len(ranges.nbytes):
        raise BadRequest("the vectors of a read differ in length")
    if len(ranges.nbytes) == 0:
        raise BadRequest("a read of no ranges: success with nothing moved would be a lie")
    if not ranges.nbytes.all():
        raise BadRequest(f"range {int(np.argmin(ranges.nbytes))} of a read is empty")


def slices(ranges: Ranges, nbytes_max: int) -> Iterator[Ranges]:
    """The same bytes in the same order, in batches of at most `nbytes_max`; ranges are cut where they must be."""
    ends = np.cumsum(ranges.nbytes, dtype=np.uint64)
    starts = ends - ranges.nbytes
    total = int(ends[-1])
    for start in range(0, total, nbytes_max):
        stop = min(total, start + nbytes_max)
        first = int(np.searchsorted(ends, start, "right"))
        last = int(np.searchsorted(starts, stop, "left"))
        skipped = np.maximum(starts[first:last], np.uint64(start)) - starts[first:last]
        cut_ends = np.minimum(ends[first:last], np.uint64(stop))
        yield Ranges(
            ranges.remote[first:last] + skipped,
            ranges.local[first:last] + skipped,
            cut_ends - starts[first:last] - skipped,
        )


class RegisteredRanges:
    """A counted set of ranges, which may repeat and overlap; says whether bytes are covered by their union.

    A change costs O(1); the first question after changes sorts the n ranges once; each range asked about then costs
    O(log n), a whole batch at a time.
    """

    def __init__(self) -> None:
        #: Guards both fields: buffers are registered in one thread and asked about in another, which needs the answer.
        self._lock = threading.Lock()
        #: {(address, nbytes): how often it is registered}, never 0.
        self._counts: dict[tuple[int, int], int] = {}
        #: The union as disjoint (starts, ends), rising, none touching another; None after a change.
        self._union: tuple[U64, U64] | None = None

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, address: int, nbytes: int) -> None:
        if nbytes <= 0 or address <= 0 or address + nbytes > ADDRESS_MAX:
            raise BadRequest(f"cannot register {nbytes} bytes at {address:#x}: not a range of memory")
        with self._lock:
            count = self._counts.get((address, nbytes), 0)
            self._counts[address, nbytes] = count + 1
            if count == 0:
                self._union = None

    def remove(self, address: int, nbytes: int) -> None:
        with self._lock:
            count = self._counts.get((address, nbytes), 0)
            if count == 0:
                raise NotRegistered(
                    f"{nbytes} bytes at {address:#x} are not registered; deregister what was registered"
                )
            if count > 1:
                self._counts[address, nbytes] = count - 1
            else:
                del self._counts[address, nbytes]
                self._union = None

    def clear(self) -> None:
        with self._lock:
            self._counts.clear()
            self._union = None

    def first_uncovered(self, addresses: U64, nbytes: U64) -> int | None:
        """Index of the first range with a byte that is not registered, or None."""
        with self._lock:
            if self._union is None:
                self._union = _union(self._counts)
            starts, ends = self._union
        if len(starts) == 0:
            return 0
        at = np.searchsorted(starts, addresses, "right")
        stops = addresses + nbytes
        covered = (at > 0) & (stops <= ends[at - 1]) & (stops > addresses)
        return None if covered.all() else int(np.argmin(covered))


def _union(counts: dict[tuple[int, int], int]) -> tuple[U64, U64]:
    bounds = np.array(sorted((address, address + nbytes) for address, nbytes in counts), dtype=np.uint64).reshape(-1, 2)
    starts, reach = bounds[:, 0], np.maximum.accumulate(bounds[:, 1])
    opens = np.ones(len(starts), dtype=bool)
    opens[1:] = starts[1:] > reach[:-1]
    last = np.append(np.flatnonzero(opens)[1:] - 1, len(starts) - 1) if len(starts) else np.empty(0, dtype=np.int64)
    return starts[opens], reach[last]
