"""Tensors that several shards hold rows of: what a rank of a sharded trainer has, and the whole that a reader wants.

A rank publishes the rows it has under a name that says which they are, `w[128:256/512]`; a reader that makes its own
memory gives those rows of the whole `w` to it, so that nothing is gathered, and nothing put together afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
