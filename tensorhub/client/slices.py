"""Tensors that several shards hold rows of: what a rank of a sharded trainer has, and the whole that a reader wants.

A rank publishes the rows it has under a name that says which they are, `w[128:256/512]`; a reader that makes its own
memory gives those rows of the whole `w` to it, so that nothing is gathered, and nothing put together afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor

_NAMED = re.compile(r"(?P<name>.+)\[(?P<start>\d+):(?P<stop>\d+)/(?P<rows>\d+)\]")


@dataclass(frozen=True, slots=True, order=True)
class Slice:
    """Rows `start` to `stop`, that one excluded, of the `rows` of tensor `name`."""

    name: str
    start: int
    stop: int
    rows: int

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}/{self.rows}]"

    @classmethod
    def of(cls, text: str, shape: Sequence[int]) -> Slice | None:
        """What a tensor of that name and shape is rows of; None when it is a tensor by itself."""
        found = _NAMED.fullmatch(text)
        if found is None:
            return None
        piece = cls(found["name"], int(found["start"]), int(found["stop"]), int(found["rows"]))
        is_one = piece.start < piece.stop <= piece.rows and str(piece) == text and len(shape) > 0
        return piece if is_one and shape[0] == piece.stop - piece.start else None


def missing(pieces: list[Slice]) -> str | None:
    """Which rows of one tensor are held by none of its pieces, or by two; None when each is held once."""
    at = 0
    for piece in sorted(pieces):
        if piece.start != at or piece.rows != pieces[0].rows:
            return f"rows {at} to {piece.start} of {piece.name!r}"
        at = piece.stop
    return None if at == pieces[0].rows else f"rows {at} to {pieces[0].rows} of {pieces[0].name!r}"


def joined(pieces: Sequence[tuple[Slice, torch.Tensor]]) -> torch.Tensor | None:
    """The whole tensor that these rows of it are, one after the other in the same memory; None where they are not."""
    if missing([piece for piece, _ in pieces]) is not None:
        return None
    first, *others = [tensor for _, tensor in sorted(pieces, key=lambda each: each[0])]
    tail, memory, at = first.shape[1:], first.untyped_storage().data_ptr(), first.data_ptr() + first.nbytes
    for tensor in others:
        is_alike = (tensor.dtype, tensor.shape[1:]) == (first.dtype, tail)
        is_next = (tensor.untyped_storage().data_ptr(), tensor.data_ptr()) == (memory, at)
        if not is_alike or (tensor.nbytes and not is_next):
            return None
        at += tensor.nbytes
    return first.as_strided((pieces[0][0].rows, *tail), first.stride(), first.storage_offset())


@dataclass(slots=True)
class _Whole:
    """Memory of a whole tensor, and which rows of it were given away."""

    tensor: torch.Tensor
    given: list[tuple[int, int]]

    def has_room(self, start: int, stop: int) -> bool:
        return all(stop <= first or last <= start for first, last in self.given)


class Wholes:
    """Memory for whole tensors, given to shards by rows.

    A shard that asks again for the rows it had gets them again. Other rows that overlap them get other memory: what
    was there may still be read, and is drained by the shard that has it alone.
    """

    def __init__(self, make: Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]) -> None:
        self._make = make
        #: By name, rows, shape of a row and dtype.
        self._wholes: dict[tuple[object, ...], list[_Whole]] = {}

    def rows(self, piece: Slice, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for these rows, of a whole that has room for all the others."""
        cut, wholes = (piece.start, piece.stop), self._wholes.setdefault(_form(piece, shape, dtype), [])
        whole = next((each for each in wholes if cut in each.given), None)
        whole = whole or next((each for each in wholes if each.has_room(*cut)), None)
        if whole is None:
            whole = _Whole(self._make(piece.name, (piece.rows, *shape[1:]), dtype), [])
            wholes.append(whole)
        if cut not in whole.given:
            whole.given.append(cut)
        return whole.tensor[piece.start : piece.stop]

    def keep(self, pieces: Iterable[tuple[Slice, torch.Tensor]]) -> None:
        """These are in use, and nothing else is any more."""
        used = {
            (_form(piece, tensor.shape, tensor.dtype), (piece.start, piece.stop), tensor.data_ptr())
            for piece, tensor in pieces
        }
        for form, wholes in list(self._wholes.items()):
            for whole in wholes:
                whole.given = [cut for cut in whole.given if (form, cut, whole.tensor[slice(*cut)].data_ptr()) in used]
            self._wholes[form] = [whole for whole in wholes if whole.given]
            if not self._wholes[form]:
                del self._wholes[form]


def _form(piece: Slice, shape: Sequence[int], dtype: torch.dtype) -> tuple[object, ...]:
    return piece.name, piece.rows, tuple(shape[1:]), dtype


def is_distributed(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether it is one of torch's distributed tensors, of which each rank has a part."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def own_rows(tensor: DTensor) -> range | None:
    """The rows that this rank has and answers for: none where another rank does. No collective.

    None where ranks have something else than rows: then it has to be gathered.
    """
    mesh: Any = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    cuts = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    # A strided shard, of several parallelisms at once, is no stretch of rows.
    is_cut = len(cuts) == 1 and type(tensor.placements[cuts[0]]).__name__ == "Shard"
    if not is_cut or not tensor.placements[cuts[0]].is_shard(0) or not tensor.numel():
        return None
    if coordinate is None or any(at for dim, at in enumerate(coordinate) if dim not in cuts):
        return range(0)
    rows, ranks, rank = tensor.shape[0], mesh.size(cuts[0]), coordinate[cuts[0]]
    each = -(-rows // ranks)  # as `torch.chunk` cuts
    return range(min(rank * each, rows), min((rank + 1) * each, rows))


def gathered(tensor: DTensor) -> torch.Tensor:
    """The whole tensor: collective, every rank of its mesh must ask."""
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local()
