"""What a version is: names, shapes, dtypes, aliases, and the byte stream and chunks that follow from them.

Decides the order of the stream, where chunks end, and which encoded manifests are acceptable. It never touches memory
and knows no address: every holder maps its own memory onto the stream (`memory_map.py`). Columns, not objects: a
hundred thousand entries cost a few array operations.

The stream, S bytes. All numbers follow from the entries, so none of them is encoded:

    0             tiny_bytes                                          S
    +-------------+-------------------+-------------------+---- ... --+
    | tiny entries| large entry       | large entry       |           |     entries in order of their UTF-8 names
    +-------------+-------------------+-------------------+---- ... --+
    each at a multiple of 16,         back to back, no padding
    zero padding                      a chunk never crosses an edge drawn here
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from tensorhub.errors import Broken, LayoutMismatch, SourceFailed
from tensorhub.pipeline.columns import I64, Columns, pack, short, shown, table_of, unpack
from tensorhub.ports import U64
from tensorhub.types import Digest

#: Up to here a tensor costs more as a range of its own than as a copy: it goes into the tiny segment.
TINY_BYTES = 4096
#: Every dtype's natural alignment, so that a staged tensor can be viewed as what it is.
ALIGN_BYTES = 16
#: A shard has about this many chunks: progress in tenths of a percent, and 8 KiB of digests.
CHUNKS_TARGET = 1024
#: Below, per-chunk work outweighs the bytes; above, a failed chunk is too much to read again.
CHUNK_BYTES_MIN = 64 << 10
CHUNK_BYTES_MAX = 8 << 20


@dataclass(frozen=True, eq=False)
class Manifest:
    """The entries of one shard of a version, in order of name, and their places in its stream.

    Column i belongs to `names[i]`. Immutable; compare by `digest`.
    """

    columns: Columns
    #: Where an entry's bytes begin; for an alias, within its parent's bytes; 0 for an entry without bytes.
    stream_offset: U64
    stream_bytes: int
    #: Length of the tiny segment at the stream's start.
    tiny_bytes: int
    chunk_bytes: int
    #: Stream offset at which each chunk ends.
    chunk_ends: U64

    @classmethod
    def build(
        cls,
        names: Iterable[str],
        dtypes: Iterable[str],
        shapes: Iterable[tuple[int, ...]],
        nbytes: ArrayLike,
        parent: ArrayLike | None = None,
        parent_offset: ArrayLike | None = None,
    ) -> Manifest:
        """The manifest of these entries, in any order. `LayoutMismatch` says what makes them none."""
        sizes = np.array(nbytes, dtype=np.uint64).reshape(-1)
        parents = np.full(len(sizes), -1) if parent is None else np.array(parent, dtype=np.int64).reshape(-1)
        within = np.zeros(len(sizes)) if parent_offset is None else parent_offset
        columns = Columns(
            list(names),
            *table_of(list(dtypes)),
            *table_of(list(shapes)),
            sizes,
            parents,
            np.array(within, dtype=np.uint64).reshape(-1),
        )
        return cls.of(columns.sorted())

    @classmethod
    def of(cls, columns: Columns) -> Manifest:
        """The manifest of columns in order of name. `LayoutMismatch` says what makes them none."""
        problem = columns.problem()
        if problem is not None:
            raise LayoutMismatch(f"these tensors make no version: {problem}")
        return cls._lay_out(columns)

    @classmethod
    def _lay_out(cls, columns: Columns) -> Manifest:
        nbytes, parent, within = columns.nbytes, columns.parent, columns.parent_offset
        own = (parent < 0) & (nbytes > 0)
        is_tiny = own & (nbytes <= TINY_BYTES)
        is_large = own & ~is_tiny
        offset = np.zeros(len(nbytes), dtype=np.uint64)
        tiny_ends = np.cumsum(_aligned(nbytes[is_tiny]), dtype=np.uint64)
        offset[is_tiny] = tiny_ends - _aligned(nbytes[is_tiny])
        tiny_bytes = int(tiny_ends[-1]) if tiny_ends.size else 0
        large_ends = np.cumsum(nbytes[is_large], dtype=np.uint64) + np.uint64(tiny_bytes)
        offset[is_large] = large_ends - nbytes[is_large]
        stream_bytes = int(large_ends[-1]) if large_ends.size else tiny_bytes
        is_alias = parent >= 0
        offset[is_alias] = offset[parent[is_alias]] + within[is_alias]
        segments = nbytes[is_large]
        if tiny_bytes:
            segments = np.concatenate((np.array([tiny_bytes], dtype=np.uint64), segments))
        chunk_bytes = chunk_size(stream_bytes)
        chunk_ends = _chunk_ends(segments, chunk_bytes)
        for column in (nbytes, parent, within, offset, chunk_ends):
            column.flags.writeable = False
        return cls(columns, offset, stream_bytes, tiny_bytes, chunk_bytes, chunk_ends)

    @property
    def names(self) -> list[str]:
        return self.columns.names

    @cached_property
    def dtypes(self) -> list[str]:
        """torch's names without "torch."."""
        return [self.columns.dtypes[i] for i in self.columns.dtype_of]

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        return [self.columns.shapes[i] for i in self.columns.shape_of]

    @property
    def nbytes(self) -> U64:
        """Bytes of each entry's elements, also for aliases."""
        return self.columns.nbytes

    @property
    def parent(self) -> I64:
        """Index of the entry whose bytes hold this one, -1 for none. A parent has no parent."""
        return self.columns.parent

    @property
    def parent_offset(self) -> U64:
        return self.columns.parent_offset

    @property
    def chunks(self) -> int:
        return len(self.chunk_ends)

    @cached_property
    def chunk_starts(self) -> U64:
        """Stream offset at which each chunk starts."""
        return np.concatenate((np.zeros(min(1, self.chunks), dtype=np.uint64), self.chunk_ends[:-1]))

    @cached_property
    def index(self) -> dict[str, int]:
        """{name: its row}."""
        return {name: i for i, name in enumerate(self.names)}

    @cached_property
    def root(self) -> I64:
        """Index of the entry whose bytes an entry is: itself, or its parent."""
        return np.where(self.parent < 0, np.arange(len(self.names)), self.parent)

    @cached_property
    def own(self) -> I64:
        """Entries with bytes of their own, in the order of the stream."""
        has_own = (self.parent < 0) & (self.nbytes > 0)
        is_tiny = self.nbytes <= TINY_BYTES
        return np.concatenate((np.flatnonzero(has_own & is_tiny), np.flatnonzero(has_own & ~is_tiny)))

    @cached_property
    def digest(self) -> Digest:
        """blake2b-128 of the encoded manifest."""
        return Digest(hashlib.blake2b(self._encoded, digest_size=16).digest())

    def encode(self) -> bytes:
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        return pack(self.columns)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """The manifest that `data` encodes; `SourceFailed` for anything that `encode` would not have produced."""
        columns = unpack(data)
        problem = columns.problem()
        if problem is not None:
            raise SourceFailed(f"the source's manifest is malformed: {problem}")
        manifest = cls._lay_out(columns)
        if manifest.encode() != data:
            raise SourceFailed("the source's manifest is malformed: it is not in canonical form")
        return manifest

    def differences(self, other: Manifest, only: Collection[str] | None = None) -> list[str]:
        """Every difference in names, shapes, dtypes and sizes, by name. "here" is this manifest, "there" the other.

        With `only`, those of the names asked for; one that this manifest lacks is the asker's mistake.
        A peer's manifest may give a dtype elements of another size: its bytes would not end where the tensor does.
        """
        is_same = (self.names, self.dtypes, self.shapes) == (other.names, other.dtypes, other.shapes)
        if only is None and is_same and np.array_equal(self.nbytes, other.nbytes):
            return []
        here, there = self.index, other.index
        found: list[str] = []
        for name in sorted(here.keys() | there.keys() if only is None else only):
            i, j = here.get(name), there.get(name)
            if i is None:
                asked = "not registered here" + (
                    ", and not in the version either" if j is None else ", but in the version"
                )
                found.append(f"{short(name)}: {'missing here' if only is None else asked}")
                continue
            if j is None:
                found.append(f"{name!r}: missing there")
                continue
            if self.shapes[i] != other.shapes[j]:
                found.append(f"{name!r}: shape {shown(self.shapes[i])} here, {shown(other.shapes[j])} there")
            if self.dtypes[i] != other.dtypes[j]:
                found.append(f"{name!r}: dtype {self.dtypes[i]} here, {other.dtypes[j]} there")
            elif self.shapes[i] == other.shapes[j] and self.nbytes[i] != other.nbytes[j]:
                found.append(f"{name!r}: {self.nbytes[i]} bytes here, {other.nbytes[j]} there, as {self.dtypes[i]}")
        return found

    def tensor_at(self, stream_offset: int) -> str:
        """Name of the entry whose bytes, or the padding behind them, lie at this offset."""
        if not 0 <= stream_offset < self.stream_bytes:
            raise Broken(f"offset {stream_offset} lies outside the stream of {self.stream_bytes} bytes")
        starts = self.stream_offset[self.own]
        nth = int(np.searchsorted(starts, np.uint64(stream_offset), side="right")) - 1
        return self.names[int(self.own[nth])]

    def entries_done(self, watermark_chunks: int) -> int:
        """How many entries lie wholly below a watermark; entries without bytes always do."""
        done_bytes = self.chunk_ends[watermark_chunks - 1] if watermark_chunks > 0 else np.uint64(0)
        return int(np.searchsorted(self._sorted_ends, done_bytes, side="right"))

    @cached_property
    def _sorted_ends(self) -> U64:
        return np.sort(self.stream_offset + self.nbytes)


def chunk_size(stream_bytes: int) -> int:
    """Bytes of a chunk: the power of two that makes about `CHUNKS_TARGET` of them, within the two limits."""
    wanted = max(1, -(-stream_bytes // CHUNKS_TARGET))
    return min(CHUNK_BYTES_MAX, max(CHUNK_BYTES_MIN, 1 << (wanted - 1).bit_length()))


def _chunk_ends(segments: U64, chunk_bytes: int) -> U64:
    """Where each chunk ends, every segment being chunked on its own."""
    sizes = segments.astype(np.int64)
    counts = -(-sizes // chunk_bytes)
    starts = np.cumsum(sizes) - sizes
    firsts = np.cumsum(counts) - counts
    nth = np.arange(int(counts.sum())) - np.repeat(firsts, counts) + 1
    return (np.repeat(starts, counts) + np.minimum(nth * chunk_bytes, np.repeat(sizes, counts))).astype(np.uint64)


def _aligned(nbytes: U64) -> U64:
    unit = np.uint64(ALIGN_BYTES)
    return (nbytes + np.uint64(ALIGN_BYTES - 1)) // unit * unit
