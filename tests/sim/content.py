"""Tensors whose bytes say what they are: each word is a function of model, version, shard and its place in the stream.

So wrong bytes name themselves, and a checker needs no copy of what it expects. `SimBuffers` is the registry's
stand-in: real manifest, real memory map, numpy memory with canaries between the tensors, staging for the tiny ones.
"""

from __future__ import annotations

import random
from collections import Counter as Tally
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from tensorhub.errors import Where
from tensorhub.pipeline.counter import Span
from tensorhub.pipeline.manifest import TINY_BYTES, Manifest
from tensorhub.pipeline.memory_map import MemoryMap
from tensorhub.pipeline.plan import check_compatible

WORD = 8
#: Between tensors: nobody may ever write there.
GAP_BYTES = 64
CANARY = 0xEE
#: Added to a version's number: what a publisher wrote that broke its contract.
SPOILED = 1 << 15


@dataclass(frozen=True, slots=True)
class Layout:
    """One shard of a model: names and sizes in bytes, all multiples of a word."""

    model: int
    shard: int
    sizes: tuple[tuple[str, int], ...]
    #: Names that share all their bytes with another: {name: the other}.
    tied: tuple[tuple[str, str], ...] = ()

    def manifest(self) -> Manifest:
        own = dict(self.sizes)
        parents = dict(self.tied)
        names = sorted([*own, *parents])
        sizes = [own[parents.get(name, name)] for name in names]
        parent = [names.index(parents[name]) if name in parents else -1 for name in names]
        shapes = [(size // WORD,) for size in sizes]
        return Manifest.build(names, ["int64"] * len(names), shapes, sizes, parent, [0] * len(names))


def draw_layout(rng: random.Random, model: int, shard: int) -> Layout:
    """A shard of some hundred KiB: a few large tensors, tiny ones, one without bytes, one tied."""
    sizes = [(f"layer.{i}.weight", WORD * rng.randrange(1024, 16_000)) for i in range(rng.randint(1, 4))]
    sizes += [(f"layer.{i}.bias", WORD * rng.randint(1, 64)) for i in range(rng.randint(0, 3))]
    sizes += [("embed", 65_536), ("empty", 0)]
    return Layout(model, shard, tuple(sizes), (("head", "embed"),))


@lru_cache(maxsize=64)
def stream(model: int, version: int, shard: int, nbytes: int) -> np.ndarray:
    """The stream of a shard of a version, as bytes."""
    tag = (model << 56) | (version << 40) | (shard << 32)
    words = np.arange(nbytes // WORD, dtype=np.uint64) + np.uint64(tag)
    data = words.view(np.uint8)
    data.flags.writeable = False
    return data


def named(data: np.ndarray) -> str:
    """Whose bytes these are."""
    words = data[: len(data) // WORD * WORD].view(np.uint64) >> np.uint64(32)
    parts = [
        f"{count} words of " + ("nobody" if tag == 0xEEEEEEEE else _tag(tag))
        for tag, count in sorted(Tally(int(word) for word in words).items())
    ]
    return ", ".join(parts[:6])


def _tag(tag: int) -> str:
    version = (tag >> 8) & 0xFFFF
    spoiled = " spoiled" if version & SPOILED else ""
    return f"model {tag >> 24} version {version & ~SPOILED}{spoiled} shard {tag & 0xFF}"


@dataclass(eq=False)
class SimSelection:
    """Large tensors of a version as destination: whole chunks of their own, straight into place."""

    manifest: Manifest
    memory: MemoryMap
    wanted: Sequence[Span]
    on_device: None = None

    def install(self) -> None:
        """Nothing is staged."""


@dataclass(eq=False)
class SimBuffers:
    """`client.buffers.Buffers` over plain memory; tensors lie in an order of their own, apart from each other."""

    layout: Layout
    rng: random.Random
    name: str = "a"
    manifest: Manifest = field(init=False)
    memory: MemoryMap = field(init=False)
    regions: list[tuple[int, int]] = field(init=False)
    staged_bytes: int = field(init=False)
    on_device: None = None

    def __post_init__(self) -> None:
        self.manifest = manifest = self.layout.manifest()
        self.staged_bytes = manifest.tiny_bytes
        order = [int(i) for i in manifest.own]
        placed = self.rng.sample(order, len(order))
        self._array = np.full(sum(int(manifest.nbytes[i]) + GAP_BYTES for i in order) + GAP_BYTES, CANARY, np.uint8)
        self._staging = np.full(max(1, manifest.tiny_bytes), CANARY, np.uint8)
        #: {row of the manifest: the tensor}, in the order of the stream.
        self._tensors: dict[int, np.ndarray] = {}
        at = {}
        begin = GAP_BYTES
        for row in placed:
            at[row] = begin
            begin += int(manifest.nbytes[row]) + GAP_BYTES
        for row in order:
            self._tensors[row] = self._array[at[row] : at[row] + int(manifest.nbytes[row])]
        large = [row for row in order if manifest.nbytes[row] > TINY_BYTES]
        runs = [(self._tensors[row].ctypes.data, self._tensors[row].nbytes) for row in large]
        if manifest.tiny_bytes:
            runs.insert(0, (self._staging.ctypes.data, manifest.tiny_bytes))
        self.memory = MemoryMap.tiled([a for a, _ in runs], [n for _, n in runs])
        self.regions = [(a.ctypes.data, a.nbytes) for a in (self._array, self._staging)]
        self._writes = dict.fromkeys(order, 0)

    # ------------------------------------------------------------ what the client asks

    def counters(self) -> list[int | None]:
        return [self._writes[row] for row in self._large_rows]

    def changed(self, before: list[int | None]) -> list[str]:
        rows = [row for row, was in zip(self._large_rows, before, strict=True) if self._writes[row] != was]
        tiny = [row for row, tensor, staged in self._tiny() if not np.array_equal(tensor, staged)]
        return [self.manifest.names[row] for row in sorted([*rows, *tiny])]

    def check_in_place(self, where: Where) -> None:
        """They never move."""

    def check_large_in_place(self, where: Where) -> None:
        """Nor do these."""

    def check_writable(self, where: Where) -> None:
        """They all are."""

    def snapshot(self) -> None:
        self._staging[:] = 0
        for _, tensor, staged in self._tiny():
            staged[:] = tensor

    def stage(self) -> None:
        """Nothing is strided."""

    def staged(self) -> SimBuffers:
        return self

    def install(self) -> None:
        for _, tensor, staged in self._tiny():
            tensor[:] = staged

    def adopt(self, theirs: Manifest, where: Where) -> SimBuffers:
        check_compatible(self.manifest, theirs, where)
        return self

    def subset(self, names: Collection[str], theirs: Manifest, where: Where) -> SimSelection:
        check_compatible(self.manifest, theirs, where, only=names)
        rows = [row for row in self._tensors if self.manifest.names[row] in names]
        starts = [int(self.manifest.stream_offset[row]) for row in rows]
        memory = MemoryMap(
            *(
                np.array(column, dtype=np.uint64)
                for column in (
                    starts,
                    [self._tensors[r].ctypes.data for r in rows],
                    [self._tensors[r].nbytes for r in rows],
                )
            )
        )
        ends = [start + self._tensors[row].nbytes for start, row in zip(starts, rows, strict=True)]
        first = np.searchsorted(self.manifest.chunk_ends, starts, side="right")
        stop = np.searchsorted(self.manifest.chunk_ends, ends, side="left") + 1
        return SimSelection(self.manifest, memory, [(int(a), int(b)) for a, b in zip(first, stop, strict=True)])

    # ------------------------------------------------------------ what its user does and sees

    @property
    def large(self) -> list[str]:
        """Tensors that may be replicated alone."""
        return [
            self.manifest.names[row]
            for row, tensor in self._tensors.items()
            if tensor.nbytes > TINY_BYTES and self.manifest.names[row] != "embed"
        ]

    def rows(self) -> list[int]:
        return list(self._tensors)

    def write(self, row: int, version: int) -> None:
        """One tensor of a version, as an optimizer writes it: its counter rises."""
        self._tensors[row][:] = self._expected(row, version)
        self._writes[row] += 1

    def flip_bit(self) -> None:
        """What broken memory does: in the midst of the largest tensor, and no counter tells."""
        tensor = max(self._tensors.values(), key=len)
        tensor[len(tensor) // 2] ^= 1

    def wrong(self, version: int, names: Collection[str] | None = None) -> str | None:
        """How the tensors differ from a version, or None. Also says so when something beside them was written."""
        for row, tensor in self._tensors.items():
            name = self.manifest.names[row]
            if names is not None and name not in names:
                continue
            expected = self._expected(row, version)
            if not np.array_equal(tensor, expected):
                at = int(np.flatnonzero(tensor != expected)[0])
                return f"tensor {name!r} of version {version}, from byte {at} of {tensor.nbytes}: {named(tensor)}"
        return self.spilled()

    def wrong_prefix(self, version: int, end: int) -> str | None:
        """How the first `end` bytes of the stream, as readers of this process see them, differ from a version's."""
        staged = {row: area for row, _, area in self._tiny()}
        for row, tensor in self._tensors.items():
            shown = staged.get(row, tensor)[: max(0, end - int(self.manifest.stream_offset[row]))]
            if not np.array_equal(shown, self._expected(row, version)[: len(shown)]):
                return f"tensor {self.manifest.names[row]!r}: {named(shown)}"
        return None

    def spilled(self) -> str | None:
        """Whether a byte between the tensors was written."""
        inside = sum(int(tensor.nbytes) for tensor in self._tensors.values())
        between = self._array.nbytes - inside
        bounds = sorted((t.ctypes.data - self._array.ctypes.data, t.nbytes) for t in self._tensors.values())
        gaps, begin = [], 0
        for at, nbytes in bounds:
            gaps.append(self._array[begin:at])
            begin = at + nbytes
        gaps.append(self._array[begin:])
        whole = np.concatenate(gaps)
        return None if len(whole) == between and (whole == CANARY).all() else "bytes between the tensors were written"

    def contents(self) -> dict[str, bytes]:
        """{name: its bytes}."""
        return {self.manifest.names[row]: tensor.tobytes() for row, tensor in self._tensors.items()}

    def _expected(self, row: int, version: int) -> np.ndarray:
        begin = int(self.manifest.stream_offset[row])
        data = stream(self.layout.model, version, self.layout.shard, self.manifest.stream_bytes)
        return data[begin : begin + int(self.manifest.nbytes[row])]

    @property
    def _large_rows(self) -> list[int]:
        return [row for row, tensor in self._tensors.items() if tensor.nbytes > TINY_BYTES]

    def _tiny(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """(row, the tensor, its place in the staging memory)."""
        begins = self.manifest.stream_offset
        return [
            (row, tensor, self._staging[int(begins[row]) : int(begins[row]) + tensor.nbytes])
            for row, tensor in self._tensors.items()
            if tensor.nbytes <= TINY_BYTES
        ]
