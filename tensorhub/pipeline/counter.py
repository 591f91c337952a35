"""Which chunks to read next, and up to where a filling is verified: arithmetic of one pull.

Decides the order and size of batches and the watermark, which never decreases. It never reads, verifies or waits:
whoever drives it says what came of each batch, in any order.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

import numpy as np

from tensorhub.errors import Broken
from tensorhub.ports import U64

#: Chunks [first, stop).
Span = tuple[int, int]


class Counter:
    """The chunks of one filling. Every wanted chunk is to do, in flight, or verified; never two of them."""

    __slots__ = ("_ends", "_in_flight", "_todo", "bytes_done")

    def __init__(self, chunk_ends: U64, wanted: Sequence[Span] | None = None) -> None:
        self._ends = chunk_ends
        #: Spans nobody reads, ascending, disjoint, none empty.
        self._todo: list[Span] = _checked(wanted, len(chunk_ends))
        #: Batches taken and not yet settled.
        self._in_flight: set[Span] = set()
        #: Verified bytes of wanted chunks.
        self.bytes_done = 0

    @property
    def watermark(self) -> int:
        """Length of the prefix, in chunks, in which every wanted chunk is verified."""
        lowest = [first for first, _ in self._todo[:1]]
        lowest += [first for first, _ in self._in_flight]
        return min(lowest, default=len(self._ends))

    @property
    def todo(self) -> list[Span]:
        """Spans that nobody reads, ascending."""
        return list(self._todo)

    @property
    def is_complete(self) -> bool:
        return not self._todo and not self._in_flight

    @property
    def in_flight(self) -> int:
        """Batches taken and not yet settled."""
        return len(self._in_flight)

    def ready_bytes(self, source_watermark: int) -> int:
        """Bytes of the lowest chunks to do, in a row, that the source has: the most that one `take` could get."""
        if not self._todo or self._todo[0][0] >= source_watermark:
            return 0
        first, stop = self._todo[0]
        return self.span_bytes((first, min(stop, source_watermark)))

    def take(self, source_watermark: int, batch_bytes: int) -> Span | None:
        """The lowest chunks to do that the source has: as many as fit `batch_bytes`, at least one; None for none."""
        if not self._todo or self._todo[0][0] >= source_watermark:
            return None
        first, stop = self._todo.pop(0)
        start = int(self._ends[first - 1]) if first else 0
        fitting = int(np.searchsorted(self._ends, np.uint64(start + batch_bytes), side="right"))
        middle = min(stop, source_watermark, max(fitting, first + 1))
        if middle < stop:
            self._todo.insert(0, (middle, stop))
        self._in_flight.add((first, middle))
        return first, middle

    def verified(self, batch: Span) -> int:
        """Every chunk of a batch has its digest. Returns the watermark."""
        self._settle(batch)
        self.bytes_done += self.span_bytes(batch)
        return self.watermark

    def failed(self, batch: Span) -> None:
        """A batch did not land or verify: its chunks are to do again."""
        self._settle(batch)
        insort(self._todo, batch)

    def narrow(self, left: U64) -> int:
        """All that was to do is verified but these chunks, ascending; nothing is in flight. Returns the watermark."""
        if self._in_flight:
            raise Broken(f"chunks {sorted(self._in_flight)} are in flight and cannot be settled together")
        known = np.zeros(len(self._ends), dtype=np.bool_)
        for first, stop in self._todo:
            known[first:stop] = True
        after = _spans(left)
        if len(left) and (int(left[-1]) >= len(known) or not known[left.astype(np.int64)].all()):
            raise Broken(f"chunks {after} are to do, after {self._todo} were")
        self.bytes_done += sum(map(self.span_bytes, self._todo)) - sum(map(self.span_bytes, after))
        self._todo = after
        return self.watermark

    def span_bytes(self, span: Span) -> int:
        first, stop = span
        return int(self._ends[stop - 1]) - (int(self._ends[first - 1]) if first else 0)

    def _settle(self, batch: Span) -> None:
        if batch not in self._in_flight:
            raise Broken(f"chunks {batch} are not in flight; those in flight: {sorted(self._in_flight)}")
        self._in_flight.remove(batch)


def _spans(chunks: U64) -> list[Span]:
    """Ascending chunks as spans, as few as possible."""
    if not len(chunks):
        return []
    numbers = chunks.astype(np.int64)
    gaps = np.flatnonzero(np.diff(numbers) != 1)
    firsts = numbers[np.concatenate(([0], gaps + 1))]
    stops = numbers[np.concatenate((gaps, [len(numbers) - 1]))] + 1
    return list(zip(firsts.tolist(), stops.tolist(), strict=True))


def _checked(wanted: Sequence[Span] | None, chunks: int) -> list[Span]:
    spans = [(0, chunks)] if wanted is None and chunks else list(wanted or ())
    edges = [edge for span in spans for edge in span]
    if (
        any(first >= stop for first, stop in spans)
        or edges != sorted(edges)
        or (edges and not (edges[0] >= 0 and edges[-1] <= chunks))
    ):
        raise Broken(f"chunks wanted {spans} are not ascending spans within {chunks} chunks")
    return spans
