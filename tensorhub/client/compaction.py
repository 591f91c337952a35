"""How registered tensors meet a version's stream: runs where their own memory can be read, staging where it cannot.

Decides what is staged: tiny tensors, side by side in one segment, and strided tensors whose contiguous runs are too
short to move one by one. It never decides when to copy; `BufferSet.stage` and `BufferSet.install` do.

    stream     | tiny segment   | large, contiguous | large, rows >= RUN_BYTES_MIN | large, finer strides |
                     |                  |              |     |     |                     |
    memory       staging (16-byte     tensor          run   run   run                 staging
                 aligned, zeros       itself          of the tensor                   (row-major)
                 between)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tensorhub.client.aliases import I64, grid
from tensorhub.client.tensors import Tensors
from tensorhub.native import copy_ranges, differing
from tensorhub.pipeline.counter import Span
from tensorhub.pipeline.manifest import TINY_BYTES, Manifest
from tensorhub.pipeline.memory_map import MemoryMap
from tensorhub.ports import U64

#: Shorter runs cost more as ranges of a read than as one more copy.
RUN_BYTES_MIN = 4096
#: Staged tensors start on a cache line of their own, so that copies into them are aligned.
AREA_ALIGN_BYTES = 64

#: (a tensor's elements where they lie, the same elements row-major in staging), both as plain integers.
Pair = tuple[torch.Tensor, torch.Tensor]
#: Columns (stream offsets, addresses, nbytes).
Run = tuple[U64, U64, U64]
#: (stream offset, offset in the staging buffer, nbytes).
Staged = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Copies within this process: `nbytes[i]` bytes from `sources[i]` to `destinations[i]`; no two overlap."""

    sources: U64
    destinations: U64
    nbytes: U64

    def run(self) -> None:
        if len(self.nbytes):
            copy_ranges(self.sources, self.destinations, self.nbytes)

    def differing(self) -> NDArray[np.int64]:
        """Indices of the moves whose two places hold different bytes."""
        return differing(self.sources, self.destinations, self.nbytes)

    def back(self) -> Moves:
        return Moves(self.destinations, self.sources, self.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where a stream lies here, and the copies between staging memory and tensors."""

    memory: MemoryMap
    #: Chunks that `memory` covers: all of them, except for a subset.
    wanted: list[Span]
    #: One allocation of bytes; empty when nothing is staged.
    staging: torch.Tensor
    #: Contiguous tiny tensors to their places in the tiny segment, back at install; and which entries they are.
    tiny: Moves
    tiny_entries: I64
    #: Install only: tensors whose bytes the version holds once, but which have memory of their own here.
    fills: Moves
    #: Strided tensors and their staging areas; back at install.
    strided: list[Pair]
    #: Install only: strided tensors that need a fill.
    strided_fills: list[Pair]


def place(held: Tensors, mine: Manifest, theirs: Manifest, rows: I64) -> Placement:
    """Map the tensors onto the stream of `theirs`, of which `mine` is the manifest in this memory.

    `rows` says for each entry of `theirs` which tensor takes it, -1 for none: then only chunks that hold bytes of
    taken entries are covered. Expects manifests that `plan.check_compatible` has passed.
    """
    wanted = _wanted(theirs, rows)
    covered = _chunks_of(wanted)
    is_large = theirs.nbytes[theirs.own] > TINY_BYTES
    large, tiny = theirs.own[is_large], theirs.own[~is_large]
    large_plain, large_strided = _taken(held, rows, large)
    tiny_plain, tiny_strided = _taken(held, rows, tiny)
    apart_plain, apart_strided = _taken(held, rows, _apart(mine, theirs, rows))

    segment = [(start, start, stop - start) for start, stop in _spans_within(theirs, covered, 0, theirs.tiny_bytes)]
    areas = _Areas(theirs.tiny_bytes if segment else 0)
    runs, staged, pairs = _strided(held, theirs, rows, large_strided, areas)
    staged += segment + _borrowed(theirs, large[rows[large] < 0], covered, areas)
    pairs += [(int(rows[i]), int(theirs.stream_offset[i])) for i in tiny_strided]
    filled = [(int(rows[i]), areas.take(int(theirs.nbytes[i]))) for i in apart_strided]

    staging = torch.empty(areas.nbytes, dtype=torch.uint8, device="cpu")
    staging[: theirs.tiny_bytes].zero_()  # the padding between tiny tensors is part of the version
    base = np.uint64(staging.data_ptr())
    offsets, places, sizes = np.array(staged, dtype=np.uint64).reshape(-1, 3).T
    runs.append((offsets, base + places, sizes))
    runs.append((theirs.stream_offset[large_plain], held.addresses[rows[large_plain]], theirs.nbytes[large_plain]))
    memory = _in_stream_order(runs)
    filled_areas = base + np.array([area for _, area in filled], dtype=np.uint64)
    return Placement(
        memory,
        wanted,
        staging,
        Moves(held.addresses[rows[tiny_plain]], base + theirs.stream_offset[tiny_plain], theirs.nbytes[tiny_plain]),
        tiny_plain,
        _fills(
            memory,
            theirs,
            np.concatenate((apart_plain, apart_strided)),
            np.concatenate((held.addresses[rows[apart_plain]], filled_areas)),
        ),
        [_pair(held.tensors[row], staging, area) for row, area in pairs],
        [_pair(held.tensors[row], staging, area) for row, area in filled],
    )


def strided_runs(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> tuple[U64, int] | None:
    """(offsets in row-major order, bytes of each run) of a strided tensor; None when its runs are too short."""
    block = item_bytes
    outer: list[tuple[int, int]] = []
    for dim, stride in zip(reversed(shape), reversed(strides), strict=True):
        if dim == 1:
            continue
        if not outer and stride * item_bytes == block:
            block *= dim
        else:
            outer.insert(0, (dim, stride * item_bytes))
    return (grid(outer), block) if block >= RUN_BYTES_MIN else None


def raw_view(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of any tensor as integers of the same width: dtypes without arithmetic can be copied, too.

    Writes through it do not raise the tensor's `_version`.
    """
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    shape, strides, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    kind = kinds.get(tensor.itemsize)
    if kind is None:  # complex128: two words per element
        kind, shape, strides, offset = torch.int64, (*shape, 2), (*(2 * s for s in strides), 1), 2 * offset
    return torch.empty(0, dtype=kind, device="cpu").set_(tensor.untyped_storage(), offset, shape, strides)


class _Areas:
    """Hands out disjoint parts of a staging buffer to be; the tiny segment comes first, at 0."""

    __slots__ = ("nbytes",)

    def __init__(self, tiny_bytes: int) -> None:
        self.nbytes = tiny_bytes

    def take(self, nbytes: int) -> int:
        area = -(-self.nbytes // AREA_ALIGN_BYTES) * AREA_ALIGN_BYTES
        self.nbytes = area + nbytes
        return area


def _taken(held: Tensors, rows: I64, entries: I64) -> tuple[I64, I64]:
    """Of these entries, those that a contiguous tensor takes, and those that a strided one takes."""
    entries = entries[rows[entries] >= 0]
    is_plain = held.is_contiguous[rows[entries]]
    return entries[is_plain], entries[~is_plain]


def _strided(
    held: Tensors, theirs: Manifest, rows: I64, entries: I64, areas: _Areas
) -> tuple[list[Run], list[Staged], list[tuple[int, int]]]:
    """(runs of tensors read in place, staged stretches of the others, their (row, area) pairs)."""
    runs: list[Run] = []
    staged: list[Staged] = []
    pairs: list[tuple[int, int]] = []
    for entry in map(int, entries):
        row, start, nbytes = int(rows[entry]), int(theirs.stream_offset[entry]), int(theirs.nbytes[entry])
        cut = strided_runs(held.shape(row), held.strides[row], held.tensors[row].itemsize)
        if cut is None:
            area = areas.take(nbytes)
            staged.append((start, area, nbytes))
            pairs.append((row, area))
        else:
            offsets, run_bytes = cut
            sizes = np.full(len(offsets), run_bytes, dtype=np.uint64)
            runs.append((np.uint64(start) + np.cumsum(sizes) - sizes, held.addresses[row] + offsets, sizes))
    return runs, staged, pairs


def _borrowed(theirs: Manifest, entries: I64, covered: I64, areas: _Areas) -> list[Staged]:
    """Staging for covered chunks of large entries that nobody takes: a taken alias lies in them."""
    staged: list[Staged] = []
    for entry in map(int, entries):
        start = int(theirs.stream_offset[entry])
        for first, stop in _spans_within(theirs, covered, start, start + int(theirs.nbytes[entry])):
            staged.append((first, areas.take(stop - first), stop - first))
    return staged


def _pair(tensor: torch.Tensor, staging: torch.Tensor, area: int) -> Pair:
    raw = raw_view(tensor)
    return raw, staging[area : area + tensor.nbytes].view(raw.dtype).view(raw.shape)


def _wanted(theirs: Manifest, rows: I64) -> list[Span]:
    """Spans of chunks that hold bytes of taken entries."""
    if (rows >= 0).all():
        return [(0, theirs.chunks)] if theirs.chunks else []
    taken = np.flatnonzero((rows >= 0) & (theirs.nbytes > 0))
    starts, ends = theirs.stream_offset[taken], theirs.stream_offset[taken] + theirs.nbytes[taken]
    steps = np.zeros(theirs.chunks + 1, dtype=np.int64)
    np.add.at(steps, np.searchsorted(theirs.chunk_ends, starts, side="right"), 1)
    np.add.at(steps, np.searchsorted(theirs.chunk_ends, ends, side="left") + 1, -1)
    return _spans(np.flatnonzero(np.cumsum(steps[:-1]) > 0))


def _spans(chunks: I64) -> list[Span]:
    """Ascending numbers as spans without gaps."""
    if not len(chunks):
        return []
    breaks = np.flatnonzero(np.diff(chunks) > 1)
    firsts = np.concatenate((chunks[:1], chunks[breaks + 1]))
    lasts = np.concatenate((chunks[breaks], chunks[-1:]))
    return [(int(first), int(last) + 1) for first, last in zip(firsts, lasts, strict=True)]


def _chunks_of(spans: list[Span]) -> I64:
    chunks = [chunk for first, stop in spans for chunk in range(first, stop)]
    return np.fromiter(chunks, np.int64, len(chunks))


def _spans_within(theirs: Manifest, covered: I64, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Stream bytes of covered chunks within [start, stop), whose edges are edges of chunks."""
    inside = covered[(theirs.chunk_starts[covered] >= start) & (theirs.chunk_ends[covered] <= stop)]
    for first, last in _spans(inside):
        yield int(theirs.chunk_starts[first]), int(theirs.chunk_ends[last - 1])


def _apart(mine: Manifest, theirs: Manifest, rows: I64) -> I64:
    """Taken aliases of the version whose memory here is not their parent's."""
    alias: I64 = np.flatnonzero((theirs.parent >= 0) & (rows >= 0))
    here, holder = rows[alias], rows[theirs.parent[alias]]
    # What shares memory here shares it alike in the version, or `check_compatible` had refused it.
    is_same: NDArray[np.bool_] = (holder >= 0) & (mine.root[here] == mine.root[holder])
    apart: I64 = alias[~is_same]
    return apart


def _fills(memory: MemoryMap, theirs: Manifest, entries: I64, destinations: U64) -> Moves:
    """Copy the bytes of these entries, which lie somewhere in the stream's memory, to where they belong as well."""
    starts = theirs.stream_offset[entries]
    cut = memory.cut(starts, starts + theirs.nbytes[entries])
    counts = np.diff(cut.firsts.astype(np.int64)).astype(np.int64)
    return Moves(cut.addresses, np.repeat(destinations, counts) + cut.begins - np.repeat(starts, counts), cut.nbytes)


def _in_stream_order(runs: list[Run]) -> MemoryMap:
    offsets, addresses, nbytes = (np.concatenate(column) for column in zip(*runs, strict=True))
    order = np.argsort(offsets, kind="stable")
    return MemoryMap(offsets[order], addresses[order], nbytes[order])
