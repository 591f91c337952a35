"""Keeps one deadline per key and says which is due: a heap whose stale entries are dropped when they surface.

It never reads a clock and never decides what a deadline means.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

#: What a deadline is for: a kind, then whatever names the subject.
Key = tuple[object, ...]
#: Stale heap entries tolerated beside the live ones before the heap is rebuilt.
STALE_MAX = 64


@dataclass(slots=True)
class Deadlines:
    #: The truth. Every key has a heap entry at or before its time.
    at: dict[Key, int] = field(default_factory=dict)
    heap: list[tuple[int, int, Key]] = field(default_factory=list)
    #: Numbers the entries, so that equal times come in the order they were set and keys are never compared.
    count: int = 0

    def set(self, key: Key, at_ns: int) -> None:
        """Move or create a deadline. A later time than before costs nothing: the entry moves when it surfaces."""
        before = self.at.get(key)
        self.at[key] = at_ns
        if before is None or at_ns < before:
            self._push(key, at_ns)

    def cancel(self, key: Key) -> None:
        """Forget a deadline; unknown ones are ignored."""
        self.at.pop(key, None)
        if len(self.heap) > 2 * len(self.at) + STALE_MAX:
            self.heap = []
            for live, at_ns in self.at.items():
                self.count += 1
                self.heap.append((at_ns, self.count, live))
            heapq.heapify(self.heap)

    def next_ns(self) -> int | None:
        """The earliest deadline."""
        while self.heap:
            at_ns, _, key = self.heap[0]
            wanted = self.at.get(key)
            if wanted == at_ns:
                return at_ns
            heapq.heappop(self.heap)
            if wanted is not None and wanted > at_ns:
                self._push(key, wanted)
        return None

    def pop(self, now_ns: int) -> Key | None:
        """A deadline that is due, removed; None when none is."""
        at_ns = self.next_ns()
        if at_ns is None or at_ns > now_ns:
            return None
        key = heapq.heappop(self.heap)[2]
        del self.at[key]
        return key

    def _push(self, key: Key, at_ns: int) -> None:
        self.count += 1
        heapq.heappush(self.heap, (at_ns, self.count, key))
