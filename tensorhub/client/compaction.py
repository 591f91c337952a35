"""How registered tensors meet a version's stream: runs where their own memory can be read, staging where it cannot.

Decides what is staged: tiny tensors, side by side in one segment, strided tensors whose contiguous runs are too short
to move one by one, and what lies on devices that not every engine reads. It never decides when to copy;
`BufferSet.stage`, `BufferSet.install` and `on_device.py` do.

    stream     | tiny segment   | large, contiguous | large, rows >= RUN_BYTES_MIN | large, finer strides | large,
                     |                  |              |     |     |                     |          on a device
    memory       staging (16-byte     tensor          run   run   run                 staging       pinned staging,
                 aligned, zeros       itself          of the tensor                   (row-major)   or the tensor
                 between)                                                                           itself
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tensorhub.client.aliases import I64, grid
from tensorhub.client.devices import Device, Pair
from tensorhub.client.moves import Moves
from tensorhub.client.on_device import Lanes, OnDevice, Piece, Tiny
from tensorhub.client.tensors import Tensors
from tensorhub.pipeline.counter import Span
from tensorhub.pipeline.manifest import TINY_BYTES, Manifest
from tensorhub.pipeline.memory_map import MemoryMap
from tensorhub.ports import U64

#: Shorter runs cost more as ranges of a read than as one more copy.
RUN_BYTES_MIN = 4096
#: Staged tensors start on a cache line of their own, so that copies into them are aligned.
AREA_ALIGN_BYTES = 64

#: Columns (stream offsets, addresses, nbytes).
Run = tuple[U64, U64, U64]
#: (stream offset, offset in the staging buffer, nbytes).
Staged = tuple[int, int, int]


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
    #: What lies on devices, or None.
    on_device: OnDevice | None


def place(
    held: Tensors, mine: Manifest, theirs: Manifest, rows: I64, lanes: Lanes, direct: frozenset[str]
) -> Placement:
    """Map the tensors onto the stream of `theirs`, of which `mine` is the manifest in this memory.

    `rows` says for each entry of `theirs` which tensor takes it, -1 for none: then only chunks that hold bytes of
    taken entries are covered. Expects manifests that `plan.check_compatible` has passed. `direct` are the kinds of
    device memory that every engine reads; `devices.Unpinnable` when staging for the others cannot be had.
    """
    with torch.inference_mode(False), torch.no_grad():  # what is made here is written to under either mode
        return _place(held, mine, theirs, rows, lanes, direct)


def _place(
    held: Tensors, mine: Manifest, theirs: Manifest, rows: I64, lanes: Lanes, direct: frozenset[str]
) -> Placement:
    wanted = _wanted(theirs, rows)
    covered = _chunks_of(wanted)
    is_large = theirs.nbytes[theirs.own] > TINY_BYTES
    large, tiny = theirs.own[is_large], theirs.own[~is_large]
    apart = _apart(mine, theirs, rows)
    large_plain, large_strided, large_far = _taken(held, rows, large)
    tiny_plain, tiny_strided, tiny_far = _taken(held, rows, tiny)
    apart_plain, apart_strided, apart_far = _taken(held, rows, apart)
    in_place = _in_place(held, theirs, rows, large_far, apart, direct)
    large_far = np.setdiff1d(large_far, in_place)

    segment = [(start, start, stop - start) for start, stop in _spans_within(theirs, covered, 0, theirs.tiny_bytes)]
    areas = _Areas(theirs.tiny_bytes if segment else 0)
    runs, staged, pairs = _strided(held, theirs, rows, large_strided, areas)
    far = {int(i): areas.take(int(theirs.nbytes[i])) for i in large_far}
    staged += [(int(theirs.stream_offset[i]), area, int(theirs.nbytes[i])) for i, area in far.items()]
    staged += segment + _borrowed(theirs, large[rows[large] < 0], covered, areas)
    pairs += [(int(rows[i]), int(theirs.stream_offset[i])) for i in tiny_strided]
    filled = [(int(rows[i]), areas.take(int(theirs.nbytes[i]))) for i in [*apart_strided, *apart_far]]
    packs = [(areas.take(int(theirs.nbytes[entries].sum())), entries) for entries in _by_device(held, rows, tiny_far)]

    staging = _staging(areas.nbytes, held.devices)
    staging[: theirs.tiny_bytes].zero_()  # the padding between tiny tensors is part of the version
    base = np.uint64(staging.data_ptr())
    offsets, places, sizes = np.array(staged, dtype=np.uint64).reshape(-1, 3).T
    runs.append((offsets, base + places, sizes))
    for entries in (large_plain, in_place):
        runs.append((theirs.stream_offset[entries], held.addresses[rows[entries]], theirs.nbytes[entries]))
    memory = _in_stream_order(runs)
    filled_areas = base + np.array([area for _, area in filled], dtype=np.uint64)
    fill_pairs = [(row, _pair(held, row, staging, area)) for row, area in filled]
    return Placement(
        memory,
        wanted,
        staging,
        Moves(held.addresses[rows[tiny_plain]], base + theirs.stream_offset[tiny_plain], theirs.nbytes[tiny_plain]),
        tiny_plain,
        _fills(
            memory,
            theirs,
            np.concatenate((apart_plain, apart_strided, apart_far)),
            np.concatenate((held.addresses[rows[apart_plain]], filled_areas)),
        ),
        [_pair(held, row, staging, area) for row, area in pairs],
        [pair for row, pair in fill_pairs if held.device(row) is None],
        OnDevice(
            theirs,
            memory,
            held.devices,
            lanes,
            _pieces(held, theirs, rows, staging, {**far, **dict.fromkeys(in_place.tolist())}),
            [_tiny(held, rows[entries], staging, area) for area, entries in packs],
            _tiny_moves(theirs, base, packs),
            [(device, pair) for row, pair in fill_pairs if (device := held.device(row)) is not None],
        )
        if held.devices
        else None,
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
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=kind, device=storage.device).set_(storage, offset, shape, strides)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, in a row. Writes through it do not raise the tensor's `_version`."""
    storage, offset = tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, offset, (tensor.nbytes,), (1,))


class _Areas:
    """Hands out disjoint parts of a staging buffer to be; the tiny segment comes first, at 0."""

    __slots__ = ("nbytes",)

    def __init__(self, tiny_bytes: int) -> None:
        self.nbytes = tiny_bytes

    def take(self, nbytes: int) -> int:
        area = -(-self.nbytes // AREA_ALIGN_BYTES) * AREA_ALIGN_BYTES
        self.nbytes = area + nbytes
        return area


def _taken(held: Tensors, rows: I64, entries: I64) -> tuple[I64, I64, I64]:
    """Of these entries, those that a contiguous tensor of the host takes, a strided one, and one on a device."""
    entries = entries[rows[entries] >= 0]
    is_far = held.device_of[rows[entries]] >= 0
    near, far = entries[~is_far], entries[is_far]
    is_plain = held.is_contiguous[rows[near]]
    return near[is_plain], near[~is_plain], far


def _in_place(held: Tensors, theirs: Manifest, rows: I64, far: I64, apart: I64, direct: frozenset[str]) -> I64:
    """Of these large entries on devices, those that engines read where they lie: contiguous, of a kind they all read.

    Not those that others are filled from: a fill reads host memory.
    """
    is_direct = np.array([device.kind in direct for device in held.devices], dtype=np.bool_)
    taken = rows[far]
    return far[is_direct[held.device_of[taken]] & held.is_contiguous[taken] & ~np.isin(far, theirs.root[apart])]


def _by_device(held: Tensors, rows: I64, entries: I64) -> list[I64]:
    """These entries on devices, those of each device together."""
    device_of = held.device_of[rows[entries]]
    return [entries[device_of == device] for device in np.unique(device_of)]


def _staging(nbytes: int, devices: Sequence[Device]) -> torch.Tensor:
    """Host memory; if there are devices, pinned for those of their kind."""
    return devices[0].pin(nbytes) if devices else torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _pieces(
    held: Tensors, theirs: Manifest, rows: I64, staging: torch.Tensor, areas: dict[int, int | None]
) -> list[Piece]:
    """Large entries on devices with their areas, None for those that are read in place, in the order of the stream."""
    found: list[Piece] = []
    for entry, area in sorted(areas.items(), key=lambda item: int(theirs.stream_offset[item[0]])):
        row, start = int(rows[entry]), int(theirs.stream_offset[entry])
        device = held.devices[int(held.device_of[row])]
        raw, staged = (_raw(held, row), None) if area is None else _pair(held, row, staging, area)
        found.append(Piece(start, start + int(theirs.nbytes[entry]), device, raw, staged))
    return found


def _tiny(held: Tensors, rows: I64, staging: torch.Tensor, area: int) -> Tiny:
    raws = [_raw(held, int(row)) for row in rows]
    nbytes = sum(raw.nbytes for raw in raws)
    return Tiny(held.devices[int(held.device_of[rows[0]])], raws, staging[area : area + nbytes])


def _tiny_moves(theirs: Manifest, base: np.uint64, packs: Sequence[tuple[int, I64]]) -> Moves:
    """From tiny entries that lie side by side in areas to their places in the tiny segment."""
    empty = np.zeros(0, dtype=np.uint64)
    sources, destinations, nbytes = [empty], [empty], [empty]
    for area, entries in packs:
        sizes = theirs.nbytes[entries]
        sources.append(base + np.uint64(area) + np.cumsum(sizes, dtype=np.uint64) - sizes)
        destinations.append(base + theirs.stream_offset[entries])
        nbytes.append(sizes)
    return Moves(np.concatenate(sources), np.concatenate(destinations), np.concatenate(nbytes))


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


def _raw(held: Tensors, row: int) -> torch.Tensor:
    """A tensor's elements where they lie: bytes in a row where it is contiguous."""
    return raw_bytes(held.tensors[row]) if held.is_contiguous[row] else raw_view(held.tensors[row])


def _pair(held: Tensors, row: int, staging: torch.Tensor, area: int) -> Pair:
    raw = _raw(held, row)
    return raw, staging[area : area + raw.nbytes].view(raw.dtype).view(raw.shape)


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
