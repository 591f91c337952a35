"""Holders with different memory relay a version in a chain, before any engine exists: plans and copies only."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub.client.registry import BufferSet, register
from tensorhub.errors import Where
from tensorhub.native import copy_ranges, digest_runs
from tensorhub.pipeline.counter import Counter
from tensorhub.pipeline.manifest import Manifest
from tensorhub.pipeline.memory_map import MemoryMap
from tensorhub.pipeline.plan import ranges
from tests.strategies import DTYPES, Layout, Model, build, fill, layouts, make, models, raw

HERE = Where(model="actor")


def pull(source: BufferSet, destination: BufferSet, batch_bytes: int, order: random.Random) -> None:
    """What a reader does: batches in any order, each by plan, until every wanted chunk is there; then install."""
    theirs = MemoryMap.decode(source.memory.encode(), source.manifest.stream_bytes)
    ends = destination.manifest.chunk_ends
    starts = destination.manifest.chunk_starts
    counter = Counter(ends, destination.wanted)
    flying = []
    while not counter.is_complete:
        batch = counter.take(len(ends), batch_bytes)
        if batch is not None:
            flying.append(batch)
        if batch is None or len(flying) > order.randrange(4):
            first, stop = flying.pop(order.randrange(len(flying)))
            if order.random() < 0.1:
                counter.failed((first, stop))
                continue
            plan = ranges(theirs, destination.memory, int(starts[first]), int(ends[stop - 1]))
            copy_ranges(plan.remote, plan.local, plan.nbytes)
            counter.verified((first, stop))
    destination.install()


def digests(held: BufferSet) -> list[int]:
    out = np.zeros(held.manifest.chunks, dtype=np.uint64)
    if len(out):
        digest_runs(*held.memory.chunk_runs(held.manifest.chunk_starts, held.manifest.chunk_ends), out)
    return out.tolist()


def contents(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: raw(tensor) for name, tensor in tensors.items()}


@st.composite
def chains(draw: st.DrawFn) -> tuple[Model, list[Layout]]:
    model = draw(models())
    tied = draw(st.booleans())
    trainer = draw(layouts(model, keeps_ties=tied))
    others = [draw(layouts(model, keeps_ties=None if tied else False)) for _ in range(2)]
    return model, [trainer, *others]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(chain=chains(), batches=st.lists(st.integers(1, 1 << 18), min_size=2, max_size=2), seed=st.integers(0, 2**32))
def test_a_chain_of_unlike_holders_ends_bit_identical(
    chain: tuple[Model, list[Layout]], batches: list[int], seed: int
) -> None:
    """Trainer to reader to reader, each with its own ties, strides, views and order, in random batches: the last one
    holds every byte of the first, and every holder's stream has the same digests (chunk_size_invariance, fused_views,
    noncontig_src, noncontig_dst, all_dtypes, zero_dim, zero_size_tensor, every_byte_written_once)."""
    model, ways = chain
    holders = [build(model, way) for way in ways]
    fill(model, holders[0], seed)
    expected = contents(holders[0])
    source = register(holders[0], name="a", where=HERE)
    source.snapshot()
    source.stage()
    order = random.Random(seed)
    version = Manifest.decode(source.manifest.encode())
    for tensors, batch_bytes in zip(holders[1:], batches, strict=True):
        reader = register(tensors, name="a", where=HERE).adopt(version, HERE)
        pull(source, reader, batch_bytes, order)
        assert contents(tensors) == expected
        assert digests(reader) == digests(source)
        source = reader


def relay(trainer: dict[str, torch.Tensor], rollout: dict[str, torch.Tensor]) -> BufferSet:
    """Publish `trainer`, pull it into `rollout`."""
    source = register(trainer, name="a", where=HERE)
    source.snapshot()
    source.stage()
    reader = register(rollout, name="a", where=HERE).adopt(source.manifest, HERE)
    pull(source, reader, 1 << 20, random.Random(0))
    return reader


@pytest.mark.parametrize("numel", [4095, 4096, 4097, 65535, 65536, 65537, 131071, 131073])
def test_sizes_around_every_boundary_arrive(numel: int) -> None:
    """slice_boundary, tensor_larger_than_chunk: sizes at the tiny limit and at chunk edges, give or take one byte."""
    model = Model({"a": ((numel,), "uint8"), "b": ((3,), "int16")}, ())
    plain = Layout(dict.fromkeys(model.entries, "plain"), False, ("b", "a"))
    trainer, rollout = build(model, plain), build(model, plain)
    fill(model, trainer, numel)
    relay(trainer, rollout)
    assert contents(rollout) == contents(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["transposed", "columns", "rows", "fused"])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_strided_tensors_arrive_right(form: str, side: str) -> None:
    """noncontig_src, noncontig_dst, fused_views: strides differ between the two sides, elements do not, and what lies
    between the elements stays untouched."""
    shape = (24, 1030)
    model = Model({"w": (shape, "float32")}, ())
    strided, plain = {"w": make(shape, "float32", form)}, {"w": make(shape, "float32", "plain")}
    trainer, rollout = (strided, plain) if side == "source" else (plain, strided)
    fill(model, trainer, 5)
    gaps = _gaps(rollout["w"])
    relay(trainer, rollout)
    assert contents(rollout) == contents(trainer)
    assert _gaps(rollout["w"]) == gaps


def _gaps(tensor: torch.Tensor) -> bytes:
    """Bytes of the storage that are no element of the tensor."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    mask = torch.ones(len(storage), dtype=torch.bool)
    item = tensor.itemsize
    index = torch.arange(len(storage) // item).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    mask.view(-1, item)[index.reshape(-1)] = False
    return storage[mask].numpy().tobytes()


def test_tied_tensors_move_once_and_arrive_under_both_names() -> None:
    """tied_once: the stream holds one copy; a reader with two memories gets both filled, one that ties gets one."""
    weight = torch.randn(500, 16)
    trainer = {"embed": weight, "head": weight, "bias": torch.randn(3)}
    untied = {name: torch.zeros_like(tensor) for name, tensor in trainer.items()}
    shared = torch.zeros_like(weight)
    reader = relay(trainer, untied)
    assert reader.manifest.stream_bytes == weight.nbytes + 16
    assert contents(untied) == contents(trainer)
    relay(trainer, {"embed": shared, "head": shared, "bias": torch.zeros(3)})
    assert torch.equal(shared, weight)


def test_an_untied_strided_alias_is_filled() -> None:
    """tied_once, noncontig_dst: a tied name may be strided, tiny or a slice where the version has it contiguous."""
    flat = torch.randn(3000)
    trainer = {"flat": flat, "slice": flat[100:1500].view(70, 20), "tiny": flat[7:11], "whole": flat.view(60, 50)}
    rollout = {
        "flat": torch.zeros(3000),
        "slice": torch.zeros(20, 70).t(),
        "tiny": torch.zeros(8)[::2],
        "whole": torch.zeros(60, 50),
    }
    reader = relay(trainer, rollout)
    assert reader.manifest.stream_bytes == flat.nbytes
    assert contents(rollout) == contents(trainer)


def test_an_empty_shard_completes_at_once() -> None:
    """empty_rank, zero_size_tensor: no tensors, or none with bytes, is a version of zero chunks; nothing is staged or
    offered to an engine."""
    for model in ({}, {"none": torch.zeros(0, 4), "nothing": torch.zeros(3, 0, dtype=torch.int8)}):
        reader = relay(model, {name: torch.zeros_like(tensor) for name, tensor in model.items()})
        assert (reader.manifest.chunks, reader.spans, reader.regions, reader.staged_bytes) == (0, [], [], 0)
        assert reader.manifest.entries_done(0) == len(model)


@pytest.mark.slow
def test_every_dtype_travels_as_bytes() -> None:
    """all_dtypes, mixed_dtype_alignment: every dtype torch has, tiny and large, contiguous and strided; tiny ones of
    mixed widths each start at a multiple of 16."""
    entries = {f"{dtype}.{n}": ((n, 3), dtype) for dtype in DTYPES for n in (1, 5, 1500)}
    model = Model(entries, ())
    trainer = build(model, Layout(dict.fromkeys(entries, "plain"), False, tuple(entries)))
    rollout = build(model, Layout(dict.fromkeys(entries, "columns"), False, tuple(reversed(entries))))
    fill(model, trainer, 3)
    reader = relay(trainer, rollout)
    assert contents(rollout) == contents(trainer)
    own = reader.manifest.own
    tiny = own[reader.manifest.nbytes[own] <= 4096]
    assert len(tiny) >= len(DTYPES)
    assert not (reader.manifest.stream_offset[tiny] % 16).any()


@pytest.mark.slow
def test_a_subset_updates_itself_and_nothing_else() -> None:
    """subset_selection_exact: of tiny, large, strided and aliased tensors, exactly the selected ones change, and the
    plan covers only chunks that hold their bytes."""
    flat = torch.randn(100_000)
    trainer = {"flat": flat, "part": flat[50_000:60_000], "tiny.a": torch.ones(5), "tiny.b": torch.ones(5)}
    trainer["big"] = torch.randn(300, 300)
    rollout = {name: torch.zeros(tensor.shape) for name, tensor in trainer.items()}
    source = register(trainer, name="a", where=HERE)
    source.snapshot()
    source.stage()
    registered = register(rollout, name="a", where=HERE)
    for only in (["part", "tiny.b"], ["big"], ["tiny.a", "flat"]):
        for tensor in rollout.values():
            tensor.zero_()
        reader = registered.subset(only, source.manifest, HERE)
        pull(source, reader, 1, random.Random(1))
        for name, tensor in rollout.items():
            assert torch.equal(tensor, trainer[name] if name in only else torch.zeros_like(tensor)), (only, name)
        assert list(map(id, reader.tensors)) == [id(rollout[name]) for name in sorted(only)]
        pulled = sum(stop - start for start, stop in reader.spans)
        assert pulled <= sum(trainer[name].nbytes for name in only) + 2 * 65536 + source.manifest.tiny_bytes


@pytest.mark.slow
def test_a_hundred_thousand_tiny_tensors_are_one_run() -> None:
    """100k_tiny_tensors: 100 000 tensors of 64 bytes are one run of memory, whatever order they are registered in."""
    trainer = {f"layers.{i}.scale": torch.full((16,), float(i)) for i in range(100_000)}
    rollout = {name: torch.zeros(16) for name in reversed(trainer)}
    reader = relay(trainer, rollout)
    assert len(reader.memory.offsets) == 1
    assert len(reader.regions) == 1
    assert all(float(rollout[f"layers.{i}.scale"][7]) == i for i in range(100_000))
    assert reader.counters() == [], "what is snapshotted is compared by its bytes"


@pytest.mark.slow
def test_offsets_past_four_gib_are_exact(tmp_path: object) -> None:
    """offset_past_4GiB: plans, maps and aliases past 2**31 and 2**32, in sparse mappings that cost no memory."""
    big = (1 << 32) + 12_345
    trainer, rollout = (torch.from_file(f"{tmp_path}/{n}", shared=True, size=big, dtype=torch.uint8) for n in "ab")
    places = [0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, big - 1]
    for place in places:
        trainer[place] = 1 + place % 251
    tail = trainer[1 << 32 :]
    source = register({"big": trainer, "tail": tail, "a": torch.ones(2000)}, name="a", where=HERE)
    source.snapshot()
    source.stage()
    copied = torch.zeros(tail.shape, dtype=torch.uint8)
    reader = register({"big": rollout, "tail": copied, "a": torch.zeros(2000)}, name="a", where=HERE)
    reader = reader.adopt(source.manifest, HERE)
    starts, ends = reader.manifest.chunk_starts, reader.manifest.chunk_ends
    base = int(reader.manifest.stream_offset[reader.manifest.index["big"]])
    for place in [*places, *range((1 << 32) & ~0xFFF, big, 4096)]:
        chunk = int(np.searchsorted(ends, np.uint64(base + place), side="right"))
        assert int(starts[chunk]) <= base + place < int(ends[chunk])
        plan = ranges(source.memory, reader.memory, base + place, base + place + 1)
        assert (int(plan.remote[0]), int(plan.local[0])) == (trainer.data_ptr() + place, rollout.data_ptr() + place)
    plan = ranges(source.memory, reader.memory, base + (1 << 32) - 1, base + big)
    copy_ranges(plan.remote, plan.local, plan.nbytes)
    reader.install()
    assert rollout[(1 << 32) - 1] == 1 + ((1 << 32) - 1) % 251
    assert torch.equal(copied, tail)
