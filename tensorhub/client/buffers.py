"""The seam between the client's logic and the tensors of a framework: what a registered buffer set must offer.

`registry.py` implements it for torch; the simulation implements it over plain bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from tensorhub.errors import Where
from tensorhub.pipeline.counter import Span
from tensorhub.pipeline.manifest import Manifest
from tensorhub.pipeline.memory_map import MemoryMap

if TYPE_CHECKING:
    from tensorhub.client.on_device import OnDevice


class Buffers(Protocol):
    """One set of registered tensors of a process, mapped onto one manifest."""

    @property
    def name(self) -> str:
        """What the user called the set; "a" by default."""
        ...

    @property
    def manifest(self) -> Manifest: ...

    @property
    def memory(self) -> MemoryMap:
        """Where each byte of the stream lies in this process; tiles the stream exactly."""
        ...

    @property
    def regions(self) -> Sequence[tuple[int, int]]:
        """(address, nbytes) to register with engines: per allocation, coalesced, never empty."""
        ...

    @property
    def staged_bytes(self) -> int:
        """Bytes of staging memory held beside the tensors themselves."""
        ...

    @property
    def on_device(self) -> OnDevice | None:
        """What of it lies on devices, and the copies to make; None when all is host memory."""
        ...

    def counters(self) -> list[int | None]:
        """A write counter (torch's `_version`, or None) of each tensor whose contents `snapshot` does not keep."""
        ...

    def changed(self, before: list[int | None]) -> list[str]:
        """Names of the tensors written to since `before = counters()`, or since the snapshot.

        Call `check_in_place` first: what tiny ones hold is read.
        """
        ...

    def check_in_place(self, where: Where) -> None:
        """Raise `UsageError` naming each tensor whose memory is no longer where it was registered."""
        ...

    def check_large_in_place(self, where: Where) -> None:
        """The same of tensors that are read and written in place at any time. Cheap: tiny ones are passed over."""
        ...

    def check_writable(self, where: Where) -> None:
        """Raise `UnsupportedTensor` naming each tensor that cannot be a destination."""
        ...

    def snapshot(self) -> None:
        """Gather tiny tensors into staging memory, within the publish call: milliseconds, whatever the model's size."""
        ...

    def stage(self) -> None:
        """Copy strided tensors into staging memory, before they are digested or served; may take its time."""
        ...

    def install(self) -> None:
        """Bring what landed in staging memory to the tensors: scatter, copies of tied names. `check_in_place` first.

        What lies on devices gets its bytes from `OnDevice.delivery`, after this.
        """
        ...

    def staged(self) -> Buffers:
        """The same tensors with nothing read on devices: for engines that refuse such memory after all."""
        ...

    def adopt(self, theirs: Manifest, where: Where) -> Buffers:
        """The same tensors mapped onto a compatible manifest with other aliases. `LayoutMismatch` lists differences."""
        ...

    def subset(self, names: Collection[str], theirs: Manifest, where: Where) -> Selection:
        """A destination for exactly these names of `theirs`."""
        ...


class Selection(Protocol):
    """A subset of a version as destination: chunks to pull, memory to pull them to, and what to do afterwards."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def memory(self) -> MemoryMap:
        """Covers exactly the chosen chunks."""
        ...

    @property
    def wanted(self) -> Sequence[Span]:
        """Spans of chunks to pull, in stream order."""
        ...

    @property
    def on_device(self) -> OnDevice | None: ...

    def install(self) -> None: ...
