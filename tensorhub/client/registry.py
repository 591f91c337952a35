"""A buffer set: registered tensors, the version they make, and where its stream lies in their memory.

Decides how tensors become a manifest and a memory map, and copies between tensors and staging memory when told to.
It never moves a byte between processes, and remembers nothing of earlier registrations: aliases and addresses are
found anew each time, because memory may have been freed and taken by another tensor since.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tensorhub.client import aliases
from tensorhub.client.aliases import I64
from tensorhub.client.compaction import Placement, place
from tensorhub.client.devices import Unpinnable
from tensorhub.client.on_device import Lanes, OnDevice
from tensorhub.client.tensors import Tensors, read
from tensorhub.errors import ContractBroken, LayoutMismatch, UnsupportedTensor, Where
from tensorhub.pipeline.columns import Columns, listed
from tensorhub.pipeline.counter import Span
from tensorhub.pipeline.manifest import TINY_BYTES, Manifest
from tensorhub.pipeline.memory_map import MemoryMap
from tensorhub.pipeline.plan import check_compatible


@dataclass(frozen=True, eq=False)
class BufferSet:
    """Registered tensors under one manifest: their own at first, a version's after `adopt` or `subset`."""

    name: str
    manifest: Manifest
    #: In order of name; after `subset` only those selected.
    tensors: list[torch.Tensor]
    held: Tensors
    #: What the tensors are in this memory: the manifest of their registration.
    mine: Manifest
    placement: Placement
    #: {row: its storage} of every tensor that is not tiny. Their memory is read and written in place, at any time: it
    #: stays mapped even when a tensor is given other memory meanwhile (`.data = `). Tiny ones are touched at snapshot
    #: and install only.
    storages: dict[int, torch.UntypedStorage]
    #: The streams on which all copies of these tensors are made.
    lanes: Lanes
    #: Kinds of device memory that every engine reads: such tensors are not staged.
    direct: frozenset[str]

    @property
    def memory(self) -> MemoryMap:
        return self.placement.memory

    @property
    def staged_bytes(self) -> int:
        """Memory that staging takes beside the tensors."""
        return self.placement.staging.nbytes

    @property
    def on_device(self) -> OnDevice | None:
        """What lies on devices, and how it is copied; None when all is host memory."""
        return self.placement.on_device

    @property
    def wanted(self) -> list[Span]:
        """Spans of chunks that `memory` covers: all chunks, except for a subset."""
        return self.placement.wanted

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The same as stretches [start, stop) of the stream."""
        starts, ends = self.manifest.chunk_starts, self.manifest.chunk_ends
        return [(int(starts[first]), int(ends[stop - 1])) for first, stop in self.wanted]

    def named(self) -> dict[str, torch.Tensor]:
        """{name: tensor}, of all that is registered."""
        return dict(zip(self.held.names, self.held.tensors, strict=True))

    def counters(self) -> list[int | None]:
        """Torch's `_version` of each tensor that is not compared by bytes; None for those made in inference mode."""
        tensors = self.held.tensors
        try:
            return [tensors[i]._version for i in self._counted]
        except RuntimeError:
            return [None if tensors[i].is_inference() else tensors[i]._version for i in self._counted]

    def changed(self, before: list[int | None]) -> list[str]:
        """Names of tensors written to since `before = counters()`; tiny ones since `snapshot()`, by their bytes.

        Reads the tiny ones where they were registered: `check_in_place` first.
        """
        now = self.counters()
        rows = [row for row, was, is_ in zip(self._counted, before, now, strict=True) if was != is_]
        tiny = self.placement.tiny_entries[self.placement.tiny.differing()]
        return sorted([self.held.names[row] for row in rows] + [self.manifest.names[i] for i in tiny])

    def check_in_place(self, where: Where) -> None:
        """Every registered tensor still lies where it was registered, else `ContractBroken` names those that moved.

        Also shapes and strides of tensors that are not tiny: in-place transposes keep the address.
        """
        if list(map(torch.Tensor.data_ptr, self.held.tensors)) != self._addresses:
            self._check_rows(range(len(self.held.tensors)), where)
        self.check_large_in_place(where)

    def check_large_in_place(self, where: Where) -> None:
        """`check_in_place` of the tensors that are not tiny: cheap, however many tiny ones there are."""
        self._check_rows(self.storages, where)

    def _check_rows(self, rows: Iterable[int], where: Where) -> None:
        names, tensors = self.held.names, self.held.tensors
        moved = [
            (row, f"moved from {self._addresses[row]:#x} to {tensors[row].data_ptr():#x}")
            for row in rows
            if tensors[row].data_ptr() != self._addresses[row]
        ]
        moved += [(row, "changed its shape or strides") for row in self.storages if not self._has_form(row)]
        if moved:
            raise ContractBroken(
                "registered tensors are no longer what was registered: "
                + "; ".join(f"{names[row]!r} {change}" for row, change in moved),
                Where(tensor=names[moved[0][0]]).over(where),
            )

    def snapshot(self) -> None:
        """Copy tiny tensors into staging memory, at memory speed: what is written to them later changes no version."""
        self.placement.tiny.run()

    def stage(self) -> None:
        """Copy staged strided tensors into staging memory: before digesting and serving them. Takes its time."""
        for raw, area in self.placement.strided:
            area.copy_(raw)

    def install(self) -> None:
        """Copy staging memory to the tensors it stands for, and fill aliases that are separate here: after the last
        verified byte. Like every byte that lands, this is no write that torch counts in `_version`.
        What lies on devices gets its bytes from `OnDevice.delivery`, after this.

        `ContractBroken`, before anything is written, when a tensor was given other memory during the pull."""
        self.check_in_place(Where())
        self.placement.fills.run()
        self.placement.tiny.back().run()
        if self.on_device is not None:
            self.on_device.tiny_moves.back().run()
        for raw, area in self.placement.strided + self.placement.strided_fills:
            raw.copy_(area)

    def check_writable(self, where: Where) -> None:
        """`UnsupportedTensor` when tensors overlap other than as aliases, or lie in memory that is mapped read-only:
        such memory cannot take a version. Found out once per registration."""
        problems = self._overlaps + self._read_only
        if problems:
            raise UnsupportedTensor(f"tensors that cannot be written: {'; '.join(problems)}", where)

    def adopt(self, theirs: Manifest, where: Where) -> BufferSet:
        """The same tensors mapped onto a version's stream, as its destination.

        `LayoutMismatch` when the version does not fit, `UnsupportedTensor` when the tensors cannot be written. Tensors
        that share memory only in the version get their bytes at install.
        """
        check_compatible(self.mine, theirs, where)
        self.check_writable(where)
        if theirs.digest == self.manifest.digest:
            return self
        return self._placed(theirs, np.arange(len(theirs.names)), self.direct, where)

    def staged(self) -> BufferSet:
        """The same tensors with nothing read on devices: all of it goes through staging memory."""
        return self._placed(self.manifest, np.arange(len(self.manifest.names)), frozenset(), Where())

    def _placed(self, theirs: Manifest, rows: I64, direct: frozenset[str], where: Where) -> BufferSet:
        placement = _place(self.held, self.mine, theirs, rows, self.lanes, direct, where)
        return replace(self, manifest=theirs, placement=placement, direct=direct)

    def subset(self, names: Collection[str], theirs: Manifest, where: Where) -> BufferSet:
        """A destination of exactly these tensors. `wanted` and `spans` say what to pull; nothing else is written.

        Names count as text, as they do when tensors are registered.
        Chunks are verified whole: bytes of other tensors that share one land in staging memory. Refused as `adopt`
        refuses, and when a selected tensor shares memory with one that is not. Such a set never serves.
        """
        names = list(dict.fromkeys(map(str, names)))
        check_compatible(self.mine, theirs, where, only=names)
        self.check_writable(where)
        rows = np.full(len(theirs.names), -1, dtype=np.int64)
        selected = sorted(self.mine.index[name] for name in names)
        rows[[theirs.index[self.mine.names[i]] for i in selected]] = selected
        placed = self._placed(theirs, rows, self.direct, where)
        return replace(placed, tensors=[self.held.tensors[i] for i in selected])

    @cached_property
    def regions(self) -> list[tuple[int, int]]:
        """(address, nbytes) to register with engines: each allocation once, and the staging buffer; none is empty.

        Tiny tensors, and those on devices that not every engine reads, are served from staging and need none. Storages
        that overlap, as two views made from one foreign pointer do, are joined; neighbours are not, for they may be
        freed one by one.
        """
        found = [(self.placement.staging.data_ptr(), self.placement.staging.nbytes)]
        is_read = np.array([device.kind in self.direct for device in self.held.devices] + [True])  # [-1] is the host's
        is_large = (self.mine.parent < 0) & (self.mine.nbytes > TINY_BYTES)
        for i in np.flatnonzero(is_large & is_read[self.held.device_of]):
            storage = self.storages[int(i)]
            found.append((storage.data_ptr(), storage.nbytes()))
        joined: list[tuple[int, int]] = []
        for address, nbytes in sorted(set(found)):
            if not nbytes:
                continue
            if joined and address < joined[-1][0] + joined[-1][1]:
                first, length = joined[-1]
                joined[-1] = (first, max(length, address + nbytes - first))
            else:
                joined.append((address, nbytes))
        return joined

    @cached_property
    def _overlaps(self) -> list[str]:
        return aliases.overlaps(self.held, self.mine.parent)

    @cached_property
    def _read_only(self) -> list[str]:
        return aliases.read_only(self.held)

    @cached_property
    def _addresses(self) -> list[int]:
        return [int(address) for address in self.held.addresses]

    @cached_property
    def _counted(self) -> list[int]:
        """Rows whose writes torch's counters must tell: all but those that are tiny, or parts of tiny ones.

        Of those only the ones in host memory: to compare what lies on a device, one would have to wait for it.
        """
        root = self.mine.root
        is_tiny = self.held.device_of < 0
        is_tiny &= (self.held.nbytes[root] <= TINY_BYTES) & self.held.is_contiguous[root] & self.held.is_contiguous
        return [int(row) for row in np.flatnonzero(~is_tiny)]

    def _has_form(self, row: int) -> bool:
        """Whether a tensor has the shape and strides it was registered with."""
        tensor, strides = self.held.tensors[row], self.held.strides.get(row)
        is_same = tensor.is_contiguous() if strides is None else tensor.stride() == strides
        return is_same and tensor.shape == self.held.shape(row)


def register(
    tensors: Mapping[Any, Any] | torch.nn.Module, *, name: str, where: Where, direct: frozenset[str] = frozenset()
) -> BufferSet:
    """The buffer set of these tensors. `UnsupportedTensor` names every tensor that has no bytes to move, and why.

    `direct` are the kinds of device memory that every engine reads; tensors in other device memory are staged.
    """
    held = read(tensors, where)
    parent, offset = aliases.find(held)
    columns = Columns(held.names, held.dtypes, held.dtype_of, held.shapes, held.shape_of, held.nbytes, parent, offset)
    try:
        manifest = Manifest.of(columns)
    except LayoutMismatch as error:  # there is no version yet that they could differ from: names or sizes are at fault
        raise UnsupportedTensor(error.message, where) from None
    rows = np.arange(len(held.names))
    storages = {int(i): held.tensors[i].untyped_storage() for i in np.flatnonzero(held.nbytes > TINY_BYTES)}
    lanes = Lanes()
    placement = _place(held, manifest, manifest, rows, lanes, direct, where)
    return BufferSet(name, manifest, held.tensors, held, manifest, placement, storages, lanes, direct)


def _place(
    held: Tensors, mine: Manifest, theirs: Manifest, rows: I64, lanes: Lanes, direct: frozenset[str], where: Where
) -> Placement:
    """`place`, or `UnsupportedTensor` naming the tensors that cannot be staged."""
    try:
        return place(held, mine, theirs, rows, lanes, direct)
    except Unpinnable as error:
        names = [held.names[i] for i in np.flatnonzero(held.device_of >= 0)]
        raise UnsupportedTensor(
            f"{listed(names)} on {', '.join(device.name for device in held.devices)} cannot be staged: no {error}; "
            "free host memory, raise `ulimit -l`, or use an engine that reads devices",
            Where(tensor=names[0]).over(where),
        ) from error
