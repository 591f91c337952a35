"""Hypothesis strategies shared by all tests: models (names, shapes, dtypes, ties) and ways to lay them out in memory.

A `Model` says what a version is; a `Layout` says how one holder keeps it. `build` makes the tensors, `fill` gives them
content that follows from (seed, name) alone, so that wrong bytes show whose they are.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

#: Every dtype this torch has that is not quantized, by its name in a manifest.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
#: How a tensor lies in memory.
FORMS = ("plain", "transposed", "columns", "rows", "fused")


@dataclass(frozen=True)
class Model:
    """Names with shapes and dtypes; `ties` are pairs of names that the first holder keeps in one memory."""

    entries: dict[str, tuple[tuple[int, ...], str]]
    ties: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Layout:
    """One holder's way: a form for each name, which ties it keeps, the order in which it registers."""

    forms: dict[str, str]
    keeps_ties: bool
    order: tuple[str, ...]


def raw(tensor: torch.Tensor) -> bytes:
    """The elements' bytes, row-major, whatever dtype and strides."""
    flat = torch.empty(0, dtype=torch.uint8)
    item = tensor.itemsize
    flat.set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * item,
        (*tensor.shape, item),
        (*(stride * item for stride in tensor.stride()), 1),
    )
    return flat.contiguous().numpy().tobytes()


def write(tensor: torch.Tensor, data: bytes) -> None:
    """Set the elements' bytes, row-major."""
    if not data:
        return
    item = tensor.itemsize
    flat = torch.empty(0, dtype=torch.uint8).set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * item,
        (*tensor.shape, item),
        (*(stride * item for stride in tensor.stride()), 1),
    )
    flat.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(flat.shape))


def content(seed: int, name: str, nbytes: int) -> bytes:
    """Bytes that only this seed and name have."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())]).bytes(nbytes)


def make(shape: tuple[int, ...], dtype: str, form: str) -> torch.Tensor:
    """Zeroed memory for one tensor in the given form; forms that a shape cannot take become plain."""
    kind = DTYPES[dtype]
    item = kind.itemsize
    if form == "fused" and len(shape) >= 1:  # a view behind another tensor in one storage
        numel = int(np.prod(shape))
        return _typed((2 * numel + 8) * item, kind)[numel + 8 :].view(shape)
    if form == "transposed" and len(shape) >= 2:
        return _typed(int(np.prod(shape)) * item, kind).view((*shape[:-2], shape[-1], shape[-2])).transpose(-1, -2)
    if form == "columns" and len(shape) >= 1:
        wide = (*shape[:-1], shape[-1] + 3)
        return _typed(int(np.prod(wide)) * item, kind).view(wide)[..., : shape[-1]]
    if form == "rows" and len(shape) >= 1:
        tall = (2 * shape[0], *shape[1:])
        return _typed(int(np.prod(tall)) * item, kind).view(tall)[::2]
    return _typed(int(np.prod(shape)) * item, kind).view(shape)


def _typed(nbytes: int, kind: torch.dtype) -> torch.Tensor:
    """Flat zeroed memory seen as `kind`, also for dtypes without arithmetic."""
    return torch.zeros(nbytes, dtype=torch.uint8).view(kind)


def build(model: Model, layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors of one holder, zeroed, in its order of registration."""
    made = {name: make(shape, dtype, layout.forms[name]) for name, (shape, dtype) in model.entries.items()}
    if layout.keeps_ties:
        for name, other in model.ties:
            made[other] = made[name]
    return {name: made[name] for name in layout.order}


def fill(model: Model, tensors: dict[str, torch.Tensor], seed: int) -> None:
    """Content by seed and name; tied names get the first one's."""
    twin = {other: name for name, other in model.ties}
    for name, tensor in tensors.items():
        write(tensor, content(seed, twin.get(name, name), tensor.numel() * tensor.itemsize))


shapes = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple),
    st.sampled_from([(64, 40), (3, 4096), (70, 1030), (40_000,), (2, 8, 700), (4097,), (33, 65)]),
)
names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=6)


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Small models with tiny and large, empty and scalar tensors of any dtype; some names tied."""
    found = draw(st.dictionaries(names, st.tuples(shapes, st.sampled_from(sorted(DTYPES))), max_size=8))
    candidates = list(found)
    ties: list[tuple[str, str]] = []
    if len(candidates) >= 2 and draw(st.booleans()):
        name, other = candidates[0], candidates[1]
        found[other] = found[name]
        ties.append((name, other))
    return Model(found, tuple(ties))


@st.composite
def layouts(draw: st.DrawFn, model: Model, keeps_ties: bool | None = None) -> Layout:
    """A way to lay a model out."""
    forms = {name: draw(st.sampled_from(FORMS)) for name in model.entries}
    kept = draw(st.booleans()) if keeps_ties is None else keeps_ties
    return Layout(forms, kept, tuple(draw(st.permutations(list(model.entries)))))
