"""The size of a chunk is a choice of cost, never of content: any size brings the same bytes by the same rules."""

from __future__ import annotations

import asyncio

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tensorhub.pipeline import follow, manifest
from tensorhub.pipeline.digest import root_digest
from tensorhub.transport.memory import MemoryEngine
from tests.strategies import Layout, Model, build, fill, raw
from tests.support.holders import Holder
from tests.support.virtual_time import run_virtual

#: 0, 1, and what lies beside and on every power of two up to beyond two of the smallest real chunks.
SIZES = (0, 1, *(size for k in range(1, 18) for size in ((1 << k) - 1, 1 << k, (1 << k) + 1)))
#: From a chunk per element of the tiny segment to one per tensor; also none that are powers of two.
CHUNK_BYTES = (16, 48, 1000, 4096, 65_536, 100_001, 8 << 20)
FORMS = ("plain", "columns", "rows", "fused")
#: A long stream has longer chunks: more of them only take longer.
CHUNKS_MAX = 64
#: A partial source shows this many more chunks whenever its reader has come so far.
STEPS = (1, 7)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Model, list[Layout]]:
    """A model of a few tensors and three ways to lay it out."""
    sizes = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=6))
    entries = {f"w{i}": ((size,), draw(st.sampled_from(["uint8", "int16"]))) for i, size in enumerate(sizes)}
    names = list(entries)
    layouts = [
        Layout({name: draw(st.sampled_from(FORMS)) for name in names}, False, tuple(draw(st.permutations(names))))
        for _ in range(3)
    ]
    return Model(entries, ()), layouts


def contents(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: raw(tensor) for name, tensor in tensors.items()}


async def rise(source: Holder, reader: Holder, step: int) -> None:
    """Show more of a source that is digested, each time its reader has what was shown."""
    while source.holding.watermark < source.manifest.chunks:
        source.raise_to(min(source.holding.watermark + step, source.manifest.chunks))
        while reader.holding.watermark < source.holding.watermark:
            await asyncio.sleep(0.001)


async def relay(model: Model, layouts: list[Layout], step: int | None, seed: int) -> None:
    """Trainer to reader to reader, the first source partial if there is a step; all is compared."""
    engine = MemoryEngine()
    tensors = [build(model, layout) for layout in layouts]
    fill(model, tensors[0], seed)
    trainer = Holder("trainer", tensors[0], engine)
    readers = [Holder(f"reader {i}", each, engine, trainer.manifest) for i, each in enumerate(tensors[1:])]
    trainer.digest()
    if step is None:
        trainer.raise_to(trainer.manifest.chunks)
    work = [reader.fill(source.source()) for reader, source in zip(readers, [trainer, *readers[:-1]], strict=True)]
    if step is not None:
        work.append(rise(trainer, readers[0], step))
    await asyncio.gather(*work)
    for reader, each in zip(readers, tensors[1:], strict=True):
        assert contents(each) == contents(tensors[0])
        assert reader.landed().tolist() == reader.holding.digests.tolist() == trainer.holding.digests.tolist()
        assert reader.root == trainer.root == root_digest(trainer.manifest.digest, trainer.landed())
        assert reader.raised == sorted(reader.raised)
    for holder in (trainer, *readers):
        holder.close()
    await engine.close()


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    world=worlds(),
    chunk_bytes=st.sampled_from(CHUNK_BYTES),
    step=st.sampled_from([None, *STEPS]),
    batch_bytes=st.sampled_from([1, 4096, 70_000, 1 << 20]),
    seed=st.integers(0, 2**32),
)
@example(
    world=(Model({"w": ((131_073,), "uint8")}, ()), [Layout({"w": "plain"}, False, ("w",))] * 3),
    chunk_bytes=65_536,
    step=1,
    batch_bytes=1,
    seed=0,
)
def test_chunk_size_invariance(
    world: tuple[Model, list[Layout]], chunk_bytes: int, step: int | None, batch_bytes: int, seed: int
) -> None:
    """chunk_size_invariance: whatever a chunk's size, a batch's, the layouts on either side, and whether the first
    source is partial or complete: the last reader of a chain has every byte, its digests are those of its own memory,
    and its root follows from them as the publisher's does."""
    model, layouts = world
    patch = pytest.MonkeyPatch()
    patch.setattr(manifest, "chunk_size", lambda stream_bytes: max(chunk_bytes, stream_bytes // CHUNKS_MAX))
    # Virtual time makes every rate infinite: a batch is as long as it may be.
    patch.setattr(follow, "BATCH_BYTES_MAX", batch_bytes)
    try:
        run_virtual(relay(model, layouts, step, seed))
    finally:
        patch.undo()


def test_the_size_of_a_chunk_follows_from_the_stream_alone() -> None:
    """chunk_size_invariance: two processes never differ in it: it is a power of two within its limits, and grows with
    the stream, never with how anybody lays it out."""
    sizes = [manifest.chunk_size(nbytes) for nbytes in (0, 1, 64 << 20, (64 << 20) + 1, 1 << 30, 1 << 50)]
    assert sizes == [64 << 10, 64 << 10, 64 << 10, 128 << 10, 1 << 20, 8 << 20]
