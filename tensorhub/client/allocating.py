"""A buffer set without tensors yet: the first version that comes says which, and they are made for it.

Decides what memory a version's manifest asks for, ties included. Until then it is an empty set of tensors, to which
nothing can be published; it never moves a byte itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

import torch

from tensorhub.client.on_device import OnDevice
from tensorhub.client.registry import BufferSet, register
from tensorhub.errors import BadRequest, LayoutMismatch, UsageError, Where
from tensorhub.pipeline.manifest import Manifest
from tensorhub.pipeline.memory_map import MemoryMap

#: Makes the tensor of a name, a shape and a dtype, whose contents do not matter: contiguous, and in host memory.
Make = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class AsPublished:
    """What `Hub.register_as_published` registers. `adopt` makes a `BufferSet` of fresh tensors."""

    #: No tensors: what there is to show before a version has come.
    nothing: BufferSet
    make: Make

    @classmethod
    def of(cls, name: str, make: Make | None, where: Where) -> AsPublished:
        """An empty set of that name, whose tensors `make` will make."""
        return cls(register({}, name=name, where=where), make or plain)

    @property
    def name(self) -> str:
        return self.nothing.name

    @property
    def manifest(self) -> Manifest:
        return self.nothing.manifest

    @property
    def memory(self) -> MemoryMap:
        return self.nothing.memory

    @property
    def regions(self) -> Sequence[tuple[int, int]]:
        return self.nothing.regions

    @property
    def staged_bytes(self) -> int:
        return 0

    @property
    def on_device(self) -> OnDevice | None:
        return None

    def named(self) -> dict[str, torch.Tensor]:
        """{name: tensor}: none yet."""
        return {}

    def counters(self) -> list[int | None]:
        return []

    def changed(self, before: list[int | None]) -> list[str]:
        del before
        return []

    def check_in_place(self, where: Where) -> None:
        """Asked before a publish alone."""
        raise UsageError(
            f"buffers {self.name!r} take the tensors of what is replicated; to publish, register() tensors of your own",
            where,
        )

    def check_large_in_place(self, where: Where) -> None:
        """Nothing lies anywhere yet."""

    def check_writable(self, where: Where) -> None:
        """Fresh memory is."""

    def snapshot(self) -> None:
        """Nothing is published from here."""

    def stage(self) -> None:
        """Nothing is published from here."""

    def install(self) -> None:
        """Nothing lands here."""

    def staged(self) -> AsPublished:
        return self

    def adopt(self, theirs: Manifest, where: Where) -> BufferSet:
        """Fresh tensors of the version's names, shapes, dtypes and ties; their contents are arbitrary."""
        return register(allocate(theirs, self.make, where), name=self.name, where=where).adopt(theirs, where)

    def subset(self, names: Collection[str], theirs: Manifest, where: Where) -> NoReturn:
        """Refused: the rest of the tensors would hold nothing at all."""
        del names, theirs
        raise UsageError(
            f"only=... updates some of the tensors, and buffers {self.name!r} have none of their own; replicate all",
            where,
        )


def allocate(manifest: Manifest, make: Make, where: Where) -> dict[str, torch.Tensor]:
    """{name: tensor}; what is tied in the version is tied here. `BadRequest` when `make` made something else."""
    made: dict[str, torch.Tensor] = {}
    dtypes = {name: _dtype(name, where) for name in set(manifest.dtypes)}
    parents = cast(list[int], manifest.parent.tolist())
    entries = list(zip(manifest.names, manifest.dtypes, manifest.shapes, parents, strict=True))
    for name, dtype, shape, parent in entries:
        if parent < 0:
            made[name] = made_by(make, name, shape, dtypes[dtype], where)
    for row, (name, dtype, shape, parent) in enumerate(entries):
        if parent >= 0:
            first, nbytes = int(manifest.parent_offset[row]), int(manifest.nbytes[row])
            held = made[manifest.names[parent]].view(-1).view(torch.uint8)[first : first + nbytes]
            made[name] = held.view(dtypes[dtype]).view(shape)
    return made


def plain(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Ordinary memory."""
    del name
    return torch.empty(shape, dtype=dtype)


def made_by(make: Make, name: str, shape: tuple[int, ...], dtype: torch.dtype, where: Where) -> torch.Tensor:
    """The tensor that `make` makes; `BadRequest` when it is not what was asked for."""
    tensor: object = make(name, shape, dtype)
    asked = f"make({name!r}, {shape}, {dtype}) returned"
    if not isinstance(tensor, torch.Tensor):
        what = f"a {type(tensor).__name__}, which is no tensor"
    elif not (tuple(tensor.shape) == shape and tensor.dtype == dtype and tensor.is_contiguous() and tensor.is_cpu):
        gaps = "" if tensor.is_contiguous() else ", not contiguous"
        what = f"{tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}{gaps}"
    else:
        return tensor
    raise BadRequest(f"{asked} {what}; it must be contiguous and in host memory", Where(tensor=name).over(where))


def _dtype(name: str, where: Where) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise LayoutMismatch(f"the version has tensors of dtype {name}, unknown to torch {torch.__version__}", where)
    return found
