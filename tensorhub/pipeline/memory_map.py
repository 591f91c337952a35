"""Where, in one holder, the bytes of a version's stream lie: runs of memory in the order of the stream.

Decides whether a map covers what it claims to cover. It never dereferences an address; a map that a peer sent is only
as good as the peer, and what is read through it is verified by digests.

Encoded: one msgpack array [magic, format, addresses (u8), nbytes (u8)], columns as little-endian bytes. Offsets follow
from the sizes, because an encoded map tiles its stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgpack
import numpy as np
from numpy.typing import ArrayLike, NDArray

from tensorhub.errors import Broken, SourceFailed
from tensorhub.ports import U64

MAGIC = "THMEMAP1"
FORMAT = 1
#: Runs of one shard: 16 GiB of strided tensors at the shortest run; 64 MiB encoded.
RUNS_MAX = 1 << 22
#: User addresses end far below; beyond this a claimed address is hostile, and sums could wrap.
ADDRESS_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Stretches of a stream cut along the runs of a map: piece k is `nbytes[k]` bytes at `addresses[k]`.

    Stretch i became pieces `firsts[i]` to `firsts[i + 1]`; `begins` are the pieces' stream offsets.
    """

    begins: U64
    addresses: U64
    nbytes: U64
    firsts: U64


@dataclass(frozen=True, slots=True, eq=False)
class MemoryMap:
    """Run i holds stream bytes `offsets[i]` to `ends[i]` at `addresses[i]`. Runs are in stream order, never empty.

    The map of a subset has gaps; every other map tiles its stream from 0.
    """

    offsets: U64
    addresses: U64
    nbytes: U64
    ends: U64 = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", self.offsets + self.nbytes)

    @classmethod
    def tiled(cls, addresses: ArrayLike, nbytes: ArrayLike) -> MemoryMap:
        """The map whose runs follow each other without gap from offset 0."""
        sizes = np.asarray(nbytes, dtype=np.uint64)
        return cls(np.cumsum(sizes, dtype=np.uint64) - sizes, np.asarray(addresses, dtype=np.uint64), sizes)

    def encode(self) -> bytes:
        if len(self.offsets) and (self.offsets[0] != 0 or not np.array_equal(self.offsets[1:], self.ends[:-1])):
            raise Broken("a map with gaps is shown to nobody")
        return bytes(
            msgpack.packb([MAGIC, FORMAT, self.addresses.astype("<u8").tobytes(), self.nbytes.astype("<u8").tobytes()])
        )

    @classmethod
    def decode(cls, data: bytes, stream_bytes: int) -> MemoryMap:
        """The map that `data` encodes, which tiles [0, stream_bytes) exactly; else `SourceFailed`."""
        try:
            fields = msgpack.unpackb(
                data,
                raw=False,
                use_list=True,
                max_array_len=4,
                max_map_len=0,
                max_ext_len=0,
                max_str_len=len(MAGIC),
                max_bin_len=8 * RUNS_MAX,
            )
        except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
            raise SourceFailed(f"the source's memory map is malformed: {error or type(error).__name__}") from None
        if not isinstance(fields, list) or fields[:2] != [MAGIC, FORMAT]:
            raise SourceFailed(f"the source's memory map is of no format this reader knows ({MAGIC} {FORMAT})")
        if len(fields) != 4 or not all(type(column) is bytes and len(column) % 8 == 0 for column in fields[2:]):
            raise SourceFailed("the source's memory map is malformed: a column is missing")
        addresses, nbytes = (np.frombuffer(column, dtype="<u8").astype(np.uint64) for column in fields[2:])
        problem = _problem(addresses, nbytes, stream_bytes)
        if problem is not None:
            raise SourceFailed(f"the source's memory map is malformed: {problem}")
        found = cls.tiled(addresses, nbytes)
        if found.encode() != data:
            raise SourceFailed("the source's memory map is malformed: it is not in canonical form")
        return found

    def cut(self, starts: ArrayLike, ends: ArrayLike) -> Cut:
        """Cut stretches [starts[i], ends[i]) along the runs. `Broken` unless runs cover every byte of each."""
        starts, ends = np.asarray(starts, dtype=np.uint64), np.asarray(ends, dtype=np.uint64)
        first = np.searchsorted(self.ends, starts, side="right")
        last = np.searchsorted(self.offsets, ends, side="left")
        counts = np.where(ends > starts, np.maximum(last - first, 0), 0)  # an empty stretch may lie within a run
        firsts = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
        run = np.repeat(first - firsts[:-1], counts) + np.arange(int(firsts[-1]))
        begins = np.maximum(self.offsets[run], np.repeat(starts, counts))
        nbytes = np.minimum(self.ends[run], np.repeat(ends, counts)) - begins
        covered = _sums(nbytes, firsts)
        if not np.array_equal(covered, ends - starts):
            bad = int(np.flatnonzero(covered != ends - starts)[0])
            raise Broken(
                f"stream bytes {int(starts[bad])} to {int(ends[bad])}: only {int(covered[bad])} have a place in memory"
            )
        return Cut(begins, self.addresses[run] + (begins - self.offsets[run]), nbytes, firsts.astype(np.uint64))

    def slice_runs(self, start: int, stop: int) -> tuple[U64, U64]:
        """(addresses, nbytes) of stream bytes [start, stop), in stream order."""
        cut = self.cut([start], [stop])
        return cut.addresses, cut.nbytes

    def chunk_runs(self, starts: ArrayLike, ends: ArrayLike) -> tuple[U64, U64, U64]:
        """(addresses, nbytes, firsts): chunk i is runs `firsts[i]` to `firsts[i + 1]`, for `native` digests."""
        cut = self.cut(starts, ends)
        return cut.addresses, cut.nbytes, cut.firsts


def _sums(values: U64, firsts: NDArray[np.int64]) -> U64:
    """Sum of each group of consecutive values; group i is `firsts[i]` to `firsts[i + 1]`, which may be empty."""
    totals = np.concatenate((np.zeros(1, dtype=np.uint64), np.cumsum(values, dtype=np.uint64)))
    return totals[firsts[1:]] - totals[firsts[:-1]]


def _problem(addresses: U64, nbytes: U64, stream_bytes: int) -> str | None:
    """Why these runs do not tile the stream."""
    if len(addresses) != len(nbytes) or len(addresses) > RUNS_MAX:
        return f"{len(addresses)} addresses, {len(nbytes)} sizes, at most {RUNS_MAX} runs"
    if not len(nbytes):
        return f"no runs for {stream_bytes} bytes" if stream_bytes else None
    if not nbytes.all() or int(nbytes.max()) > stream_bytes:
        return "an empty run, or one longer than the stream"
    if not addresses.all() or int(addresses.max()) > ADDRESS_MAX - stream_bytes:
        return "an impossible address"
    # No run exceeds the stream and there are few, so floats cannot hide a sum that wrapped.
    if nbytes.astype(np.float64).sum() > 2 * float(stream_bytes) or int(nbytes.sum()) != stream_bytes:
        return f"its runs do not sum to the stream's {stream_bytes} bytes"
    return None
