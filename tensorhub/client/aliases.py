"""Which registered tensors share memory: exactly (aliases, whose bytes move once) or in part (overlaps), and
which lie in memory that cannot be written at all.

Decides from addresses and the process's map of them, anew for each registration. It never reads the tensors' memory
and remembers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tensorhub.client.tensors import Tensors
from tensorhub.errors import EngineUnavailable
from tensorhub.ports import U64

#: Pieces that colliding strided tensors may be broken into for an exact answer: 512 MiB of columns at most.
OVERLAP_RUNS_MAX = 1 << 24

#: "start-end rwxp ..." of every mapping of this process, ascending.
MAPS = Path("/proc/self/maps")

I64 = NDArray[np.int64]


def find(held: Tensors) -> tuple[I64, U64]:
    """(parent, offset): an entry whose bytes lie inside another's, and where. Parents have none; -1 for no parent.

    Contiguous tensors nest by their bytes, whatever their dtypes. Strided ones are aliases only when pointer, shape,
    strides and dtype are all equal. Equal addresses of two devices are two places.
    """
    count = len(held.names)
    parent = np.full(count, -1, dtype=np.int64)
    offset = np.zeros(count, dtype=np.uint64)
    for device in _spaces(held):
        _nest(held, np.flatnonzero(held.is_contiguous & (held.nbytes > 0) & (held.device_of == device)), parent, offset)
    seen: dict[tuple[object, ...], int] = {}
    for i in map(int, np.flatnonzero(~held.is_contiguous & (held.nbytes > 0))):
        where = (int(held.device_of[i]), int(held.addresses[i]))
        key = (*where, held.shape(i), held.strides[i], int(held.dtype_of[i]))
        first = seen.setdefault(key, i)
        if first != i:
            parent[i] = first
    return parent, offset


def _nest(held: Tensors, rows: I64, parent: I64, offset: U64) -> None:
    """Fill in `parent` and `offset` of these contiguous entries of one address space."""
    start, size = held.addresses[rows], held.nbytes[rows]
    # The larger first among equal starts, then by name: a parent precedes all that it holds.
    order = np.lexsort((np.iinfo(np.int64).max - size.astype(np.int64), start))
    rows, start, size = rows[order], start[order], size[order]
    end = start + size
    furthest = np.concatenate((np.zeros(min(1, len(end)), dtype=np.uint64), np.maximum.accumulate(end)[:-1]))
    is_parent = end > furthest
    holder = np.maximum.accumulate(np.where(is_parent, np.arange(len(end)), 0)) if len(end) else np.zeros(0, np.int64)
    is_held = ~is_parent
    parent[rows[is_held]] = rows[holder[is_held]]
    offset[rows[is_held]] = start[is_held] - start[holder[is_held]]


def _spaces(held: Tensors) -> list[int]:
    """The address spaces of these tensors: host memory and devices, as `Tensors.device_of` counts them."""
    return [int(device) for device in np.unique(held.device_of)]


def overlaps(held: Tensors, parent: I64) -> list[str]:
    """Why some of these tensors cannot be written independently: every overlap that is no alias, by name."""
    whole = (parent < 0) & (held.nbytes > 0)
    return [
        problem
        for device in _spaces(held)
        for problem in _overlaps_of(held, np.flatnonzero(whole & (held.device_of == device)))
    ]


def _overlaps_of(held: Tensors, rows: I64) -> list[str]:
    """The same of entries in one address space."""
    strided = [int(i) for i in rows[~held.is_contiguous[rows]]]
    spans = {i: span_bytes(held, i) for i in strided}
    found = [
        f"{held.names[i]!r} overlaps itself, as an expanded tensor does"
        for i in strided
        if _overlaps_itself(held.shape(i), held.strides[i])
    ]
    nbytes = held.nbytes[rows].copy()
    if spans:
        nbytes[~held.is_contiguous[rows]] = np.array([spans[i] for i in strided], dtype=np.uint64)
    start, size, rows = _expand_colliding(held, held.addresses[rows], nbytes, rows)
    order = np.argsort(start, kind="stable")
    start, end, rows = start[order], (start + size)[order], rows[order]
    if not len(rows):
        return found
    furthest = np.maximum.accumulate(end)
    holder = np.maximum.accumulate(np.where(end == furthest, np.arange(len(end)), 0))
    hit = np.flatnonzero(start[1:] < furthest[:-1]) + 1
    pairs = dict.fromkeys(zip(rows[holder[hit - 1]].tolist(), rows[hit].tolist(), strict=True))
    return found + [f"{held.names[i]!r} and {held.names[j]!r} overlap in memory" for i, j in pairs if i != j]


def read_only(held: Tensors) -> list[str]:
    """Which of these tensors lie in memory that this process has mapped without the right to write, by name.

    Only what the map shows as such counts: it is no snapshot, and may miss what changes while it is read.
    `EngineUnavailable` when it cannot be read, as without a descriptor left: the answer may be another next time.
    """
    try:
        maps = MAPS.read_bytes()
    except OSError as error:
        raise EngineUnavailable(f"this process cannot see which of its memory may be written: {error}") from error
    starts, ends = _unwritable_mappings(maps)
    # Drivers reserve the addresses of devices here as mappings that nobody may touch.
    rows = np.flatnonzero((held.nbytes > 0) & (held.device_of < 0))
    size = held.nbytes[rows].copy()
    for k in map(int, np.flatnonzero(~held.is_contiguous[rows])):
        size[k] = span_bytes(held, int(rows[k]))
    first = held.addresses[rows]
    # The first such mapping that ends behind a tensor's first byte is the first it can touch.
    nth = np.searchsorted(ends, first, side="right")
    starts = np.append(starts, np.iinfo(np.uint64).max)
    return [f"{held.names[i]!r} lies in read-only memory" for i in rows[starts[nth] < first + size]]


def _unwritable_mappings(maps: bytes) -> tuple[U64, U64]:
    """(starts, ends), ascending, of the mappings in a `/proc/self/maps` that may not be written."""
    bounds = [
        tuple(int(edge, 16) for edge in line[: line.index(b" ")].split(b"-"))
        for line in maps.splitlines()
        if line[line.index(b" ") + 2 : line.index(b" ") + 3] != b"w"
    ]
    starts, ends = np.array(bounds, dtype=np.uint64).reshape(-1, 2).T
    return starts, ends


def _expand_colliding(held: Tensors, start: U64, size: U64, rows: I64) -> tuple[U64, U64, I64]:
    """Replace strided tensors whose outer bounds touch others by the pieces of memory they really are."""
    order = np.argsort(start, kind="stable")
    start, size, rows = start[order], size[order], rows[order]
    end = start + size
    collides = np.zeros(len(rows), dtype=np.bool_)
    if len(rows) > 1:
        collides[1:] |= start[1:] < np.maximum.accumulate(end)[:-1]
        collides[:-1] |= end[:-1] > start[1:]
    broken = np.flatnonzero(collides & ~held.is_contiguous[rows])
    parts = []
    left = OVERLAP_RUNS_MAX
    for k in broken:
        i = int(rows[k])
        pieces = memory_runs(held.shape(i), held.strides[i], held.tensors[i].itemsize, left)
        if pieces is None:
            continue  # too fine to tell: it counts as everything between its first and last byte
        offsets, run_bytes = pieces
        left -= len(offsets)
        parts.append((start[k] + offsets, np.full(len(offsets), run_bytes, np.uint64), np.full(len(offsets), i)))
        size[k] = 0
    keep = size > 0
    parts.append((start[keep], size[keep], rows[keep]))
    starts, sizes, owners = zip(*parts, strict=True)
    return np.concatenate(starts), np.concatenate(sizes), np.concatenate(owners).astype(np.int64)


def memory_runs(shape: Sequence[int], strides: Sequence[int], item_bytes: int, runs_max: int) -> tuple[U64, int] | None:
    """(offsets, bytes of each run): the memory of a strided tensor, in no order. None for more runs than allowed."""
    block = item_bytes
    outer: list[tuple[int, int]] = []
    for stride, dim in sorted(
        (stride * item_bytes, dim) for dim, stride in zip(shape, strides, strict=True) if dim > 1
    ):
        if stride == block:
            block *= dim
        elif stride:
            outer.append((dim, stride))
    if math.prod(dim for dim, _ in outer) > runs_max:
        return None
    return grid(outer), block


def grid(dims: Sequence[tuple[int, int]]) -> U64:
    """Offsets of all index combinations of (size, stride) dims, the last varying fastest."""
    offsets = np.zeros(1, dtype=np.uint64)
    for dim, stride in dims:
        steps = np.arange(dim, dtype=np.uint64) * np.uint64(stride)
        offsets = (offsets[:, None] + steps[None, :]).reshape(-1)
    return offsets


def span_bytes(held: Tensors, i: int) -> int:
    """Bytes from the first to behind the last byte of a strided tensor."""
    reach = sum((dim - 1) * stride for dim, stride in zip(held.shape(i), held.strides[i], strict=True))
    return (reach + 1) * held.tensors[i].itemsize


def _overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two indices may share an element. Exact for everything that slicing, transposing or expanding makes."""
    reach = 0
    for stride, dim in sorted((stride, dim) for dim, stride in zip(shape, strides, strict=True) if dim > 1):
        if stride <= reach:
            return True
        reach += (dim - 1) * stride
    return False
