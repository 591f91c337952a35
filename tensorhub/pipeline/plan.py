"""What a reader will copy from where: two maps of one stream laid over each other, and whether they may be at all.

Decides that a transfer is Whole before any byte moves, and proves for every batch that each of its bytes has exactly
one place on both sides. It never reads, writes or chooses a source.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tensorhub.errors import LayoutMismatch, Where
from tensorhub.pipeline.manifest import Manifest
from tensorhub.pipeline.memory_map import MemoryMap
from tensorhub.ports import U64, Ranges


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The reads that bring chunks from one source, made once; batches are cut out of it."""

    reads: Ranges
    #: Chunk c is reads `firsts[c]` to `firsts[c + 1]`; chunks that are not planned have none.
    firsts: U64

    @classmethod
    def of(
        cls, source: MemoryMap, destination: MemoryMap, starts: U64, ends: U64, wanted: Sequence[tuple[int, int]]
    ) -> Plan:
        """Plan the chunks of the spans `wanted`. `Broken` unless both maps cover every byte of each."""
        chosen = np.zeros(len(starts), dtype=np.bool_)
        for first, stop in wanted:
            chosen[first:stop] = True
        reads, firsts = chunk_ranges(source, destination, starts[chosen], ends[chosen])
        counts = np.zeros(len(starts) + 1, dtype=np.uint64)
        counts[1:][chosen] = firsts[1:] - firsts[:-1]
        return cls(reads, np.cumsum(counts, dtype=np.uint64))

    def batch(self, first: int, stop: int) -> tuple[Ranges, U64]:
        """The reads of chunks [first, stop), and which belong to which, counted from the first of them."""
        begin, end = int(self.firsts[first]), int(self.firsts[stop])
        reads = Ranges(self.reads.remote[begin:end], self.reads.local[begin:end], self.reads.nbytes[begin:end])
        return reads, self.firsts[first : stop + 1] - self.firsts[first]


def ranges(source: MemoryMap, destination: MemoryMap, start: int, stop: int) -> Ranges:
    """The reads that bring stream bytes [start, stop). `Broken` unless both maps cover every one of them."""
    return chunk_ranges(source, destination, [start], [stop])[0]


def chunk_ranges(source: MemoryMap, destination: MemoryMap, starts: ArrayLike, ends: ArrayLike) -> tuple[Ranges, U64]:
    """The reads that bring stretches [starts[i], ends[i]) of the stream, and which belong to which: stretch i is
    ranges `firsts[i]` to `firsts[i + 1]`. `Broken` unless both maps cover every byte of every stretch."""
    mine = destination.cut(starts, ends)
    theirs = source.cut(mine.begins, mine.begins + mine.nbytes)
    counts = theirs.firsts[1:].astype(np.int64) - theirs.firsts[:-1].astype(np.int64)
    local = np.repeat(mine.addresses, counts) + (theirs.begins - np.repeat(mine.begins, counts))
    return Ranges(theirs.addresses, local, theirs.nbytes), theirs.firsts[mine.firsts]


def check_compatible(mine: Manifest, theirs: Manifest, where: Where, only: Collection[str] | None = None) -> None:
    """Refuse a version that tensors laid out as `mine` cannot take; `LayoutMismatch` lists every reason.

    Names, shapes, dtypes and sizes must be equal. Tensors that share memory here must share it alike in the version:
    one place cannot take two contents. Tensors that share memory only in the version are fine: both are written.
    With `only`, the same for these names; and none of them may share memory here with one that is not to be written.
    """
    if only is None and mine.digest == theirs.digest:
        return
    problems = mine.differences(theirs, only)
    if not problems:
        problems = _ties_problems(mine, theirs, mine.names if only is None else only)
    if problems:
        raise LayoutMismatch(
            f"the version does not fit; here: registered tensors, there: version: {'; '.join(problems)}", where
        )


def _ties_problems(mine: Manifest, theirs: Manifest, names: Collection[str]) -> list[str]:
    """Every alias here among `names`, which both manifests have, that the version does not have."""
    if not (mine.parent >= 0).any():
        return []
    #: Row of each wanted entry in the version's manifest, -1 for an entry that is not wanted.
    there = np.full(len(mine.names), -1, dtype=np.int64)
    there[[mine.index[name] for name in names]] = [theirs.index[name] for name in names]
    alias = np.flatnonzero(mine.parent >= 0)
    holder = mine.parent[alias]
    is_half = (there[alias] < 0) != (there[holder] < 0)
    half = [
        f"{mine.names[i]!r} shares memory with {mine.names[j]!r} here: update both or none"
        for i, j in zip(alias[is_half], holder[is_half], strict=True)
    ]
    is_wanted = (there[alias] >= 0) & (there[holder] >= 0)
    alias, holder = alias[is_wanted], holder[is_wanted]
    i, j = there[alias], there[holder]
    # An alias lies within its holder, and sizes are equal: where its place is the same, it lies within that there, too.
    is_alike = theirs.stream_offset[i] - theirs.stream_offset[j] == mine.parent_offset[alias]
    return half + [
        f"{mine.names[a]!r} shares memory with {mine.names[h]!r} here, not so there"
        for a, h in zip(alias[~is_alike], holder[~is_alike], strict=True)
    ]
