"""Tensors on devices: what is staged, what crosses when, and that every byte does. A fake device, no engines."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorhub.client.on_device import Delivery, Feed
from tensorhub.client.registry import BufferSet, register
from tensorhub.errors import UnsupportedTensor, Where
from tensorhub.native import copy_ranges, digest_runs
from tensorhub.pipeline.counter import Counter
from tensorhub.pipeline.memory_map import MemoryMap
from tensorhub.pipeline.plan import ranges
from tests.strategies import DTYPES, Layout, Model, build, content, fill, layouts, make, models
from tests.support.fake_device import KIND, FakeDevice, fake_devices, far, peek, poke, to_far

HERE = Where(model="actor", replica="trainer-0", shard=0)
MIB = 1 << 20


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeDevice, FakeDevice]]:
    with fake_devices(monkeypatch) as opened:
        yield opened


def reg(tensors: dict[str, torch.Tensor], direct: frozenset[str] = frozenset()) -> BufferSet:
    return register(tensors, name="a", where=HERE, direct=direct)


def feed(held: BufferSet) -> Feed:
    """What a publish call does, in the caller's thread."""
    assert held.on_device is not None
    mark = held.on_device.mark(gather=True)
    held.snapshot()
    return held.on_device.feed(mark, lambda: False)


def publish(held: BufferSet) -> np.ndarray:
    """A publish and its background half, chunk by chunk; the digests."""
    out = np.zeros(held.manifest.chunks, dtype=np.uint64)
    if held.on_device is None:
        held.snapshot()
        held.stage()
        if len(out):
            digest_runs(*held.memory.chunk_runs(held.manifest.chunk_starts, held.manifest.chunk_ends), out)
        return out
    fed = feed(held)
    held.stage()
    for chunk in range(len(out)):
        assert fed.reach(chunk + 1, min(chunk + 3, len(out)))
        fed.digest(chunk, chunk + 1, out[chunk : chunk + 1])
    fed.close()
    return out


def pull(source: BufferSet, reader: BufferSet, batch_bytes: int, order: random.Random) -> None:
    """A replicate: batches in any order, deliveries whenever the watermark rises; host to host only."""
    theirs = MemoryMap.decode(source.memory.encode(), source.manifest.stream_bytes)
    starts, ends = reader.manifest.chunk_starts, reader.manifest.chunk_ends
    delivery: Delivery | None = None
    if reader.on_device is not None:
        delivery = reader.on_device.delivery(reader.on_device.mark(gather=False), lambda: 10.0)
    counter, flying = Counter(ends, reader.wanted), []
    while not counter.is_complete:
        batch = counter.take(len(ends), batch_bytes)
        if batch is not None:
            flying.append(batch)
        if batch is None or len(flying) > order.randrange(4):
            first, stop = flying.pop(order.randrange(len(flying)))
            plan = ranges(theirs, reader.memory, int(starts[first]), int(ends[stop - 1]))
            copy_ranges(plan.remote, plan.local, plan.nbytes)
            watermark = counter.verified((first, stop))
            if delivery is not None:
                delivery.reach(watermark)
    reader.install()
    if delivery is not None:
        delivery.finish()


def spread(tensors: dict[str, torch.Tensor], places: dict[str, int]) -> dict[str, torch.Tensor]:
    """The same tensors on the host (-1) or a device; those that share memory together."""
    by_storage = {tensor.untyped_storage().data_ptr(): places[name] for name, tensor in tensors.items()}
    found = {}
    for name, tensor in tensors.items():
        place = by_storage[tensor.untyped_storage().data_ptr()]
        found[name] = tensor if place < 0 else far(tensor, place)
    return found


@st.composite
def chains(draw: st.DrawFn) -> tuple[Model, list[Layout], list[dict[str, int]]]:
    model = draw(models())
    tied = draw(st.booleans())
    ways = [draw(layouts(model, keeps_ties=tied))]
    ways += [draw(layouts(model, keeps_ties=None if tied else False)) for _ in range(2)]
    place = st.integers(-1, 1)
    return model, ways, [{name: draw(place) for name in model.entries} for _ in ways]


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chain=chains(), batch_bytes=st.integers(1, 1 << 18), seed=st.integers(0, 2**32))
def test_a_chain_over_hosts_and_devices_ends_bit_identical(
    fakes: tuple[FakeDevice, FakeDevice], chain: tuple[Model, list[Layout], list[dict[str, int]]], batch_bytes, seed
) -> None:
    """Trainer to reader to reader, each tensor on the host or one of two devices, with ties, strides and views of its
    own: every byte arrives, and every holder shows the same digests (all_dtypes, fused_views, noncontig_src,
    noncontig_dst, tied_once, zero_dim, zero_size_tensor, every_byte_written_once)."""
    model, ways, places = chain
    holders = [spread(build(model, way), where) for way, where in zip(ways, places, strict=True)]
    twin = {other: name for name, other in model.ties}
    for name, tensor in holders[0].items():
        poke(tensor, content(seed, twin.get(name, name), tensor.nbytes))
    expected = {name: peek(tensor) for name, tensor in holders[0].items()}
    source = reg(holders[0])
    digests = publish(source)
    order = random.Random(seed)
    for tensors in holders[1:]:
        pointers = [tensor.data_ptr() for tensor in tensors.values()]
        reader = reg(tensors).adopt(source.manifest, HERE)
        pull(source, reader, batch_bytes, order)
        assert {name: peek(tensor) for name, tensor in tensors.items()} == expected
        assert [tensor.data_ptr() for tensor in tensors.values()] == pointers
        shown = np.zeros(len(digests), dtype=np.uint64)
        if len(shown):
            digest_runs(*reader.memory.chunk_runs(reader.manifest.chunk_starts, reader.manifest.chunk_ends), shown)
        assert shown.tolist() == digests.tolist(), "a reader serves on from staging, whatever the bytes' way on"
        source = reader


@pytest.mark.slow
def test_every_dtype_crosses_as_bytes(fakes: tuple[FakeDevice, FakeDevice]) -> None:
    """all_dtypes: every dtype torch has, tiny and large, contiguous and strided, from one device to another."""
    entries = {f"{dtype}.{n}": ((n, 3), dtype) for dtype in DTYPES for n in (1, 5, 1500)}
    model = Model(entries, ())
    ours = build(model, Layout(dict.fromkeys(entries, "plain"), False, tuple(entries)))
    theirs = build(model, Layout(dict.fromkeys(entries, "columns"), False, tuple(reversed(entries))))
    fill(model, ours, 3)
    source = reg({name: to_far(tensor) for name, tensor in ours.items()})
    publish(source)
    target = {name: far(tensor, 1) for name, tensor in theirs.items()}
    pull(source, reg(target).adopt(source.manifest, HERE), MIB, random.Random(0))
    assert {name: peek(tensor) for name, tensor in target.items()} == {n: peek(tensor) for n, tensor in ours.items()}


def test_what_is_on_a_device_is_staged_and_shown_as_such(fakes: tuple[FakeDevice, FakeDevice]) -> None:
    """Nothing of a device's memory is offered to engines; staging takes as many bytes, and says so."""
    held = reg({"far": to_far(torch.zeros(5000)), "near": torch.zeros(6000), "tiny": to_far(torch.zeros(3))})
    assert held.staged_bytes >= 20_000 + 16 + 12
    addresses = [address for address, _ in held.regions]
    assert sorted(addresses) == sorted([held.placement.staging.data_ptr(), held.tensors[1].data_ptr()])
    assert held.on_device is not None
    assert held.on_device.kinds == frozenset()


def test_a_publish_takes_what_the_stream_held_at_the_call(fakes: tuple[FakeDevice, FakeDevice]) -> None:
    """Kernels queued before the publish count, although nobody waited for them; tiny tensors are a snapshot: what is
    queued later changes no version."""
    device = fakes[0]
    tensors = {"large": far(torch.zeros(5000, dtype=torch.uint8)), "tiny": far(torch.zeros(8, dtype=torch.uint8))}
    held = reg(tensors)
    device.launch(lambda: [poke(tensor, b"\1" * tensor.nbytes) for tensor in tensors.values()])
    fed = feed(held)
    assert device.stream.pending, "the call itself waits for nothing"
    device.launch(lambda: poke(tensors["tiny"], b"\2" * 8))
    assert fed.reach(held.manifest.chunks, 0)
    stream = held.placement.staging.numpy()
    assert stream[:8].tolist() == [1] * 8
    pieces = {int(a): int(n) for a, n in zip(held.memory.addresses, held.memory.nbytes, strict=True)}
    large = max(pieces, key=lambda address: pieces[address]) - held.placement.staging.data_ptr()
    assert stream[large : large + 5000].tolist() == [1] * 5000


def test_a_publish_gives_up_waiting_when_told_to(fakes: tuple[FakeDevice, FakeDevice]) -> None:
    """A training step that hangs holds up the background half only until an unpublish; no copy is left behind."""
    held = reg({"w": to_far(torch.zeros(5000))})
    assert held.on_device is not None
    fakes[0].launch(lambda: None)
    fakes[0].stream.is_held = True
    fed = held.on_device.feed(held.on_device.mark(gather=True), lambda: True)
    assert fed.reach(1, 1) is False
    assert fakes[0].copied == []
    fed.close()


def test_copies_run_one_batch_ahead_of_the_digests(fakes: tuple[FakeDevice, FakeDevice]) -> None:
    """When a batch can be read, the next one is on its way, and nothing further."""
    held = reg({"w": to_far(torch.zeros(4 * MIB, dtype=torch.uint8))})
    fed = feed(held)
    chunk = held.manifest.chunk_bytes
    fed.reach(2, 4)
    assert sum(nbytes for _, nbytes in fakes[0].copied) == 4 * chunk
    fed.reach(4, 6)
    assert sum(nbytes for _, nbytes in fakes[0].copied) == 6 * chunk
    assert fakes[0].lanes[0].queue.pending == 1
    fed.close()
    assert fakes[0].lanes[0].queue.pending == 0


def test_tiny_tensors_cross_as_one_copy(fakes: tuple[FakeDevice, FakeDevice]) -> None:
    """100k_tiny_tensors: however many there are, one copy each way."""
    ours = {f"t{i}": to_far(torch.full((4,), float(i))) for i in range(500)}
    theirs = {name: far(torch.zeros(4)) for name in ours}
    source = reg(ours)
    publish(source)
    pull(source, reg(theirs), MIB, random.Random(0))
    assert all(peek(theirs[name]) == peek(ours[name]) for name in ours)
    assert fakes[0].copied == [("fetch", 8000), ("unpack", 8000)]


def test_verified_bytes_set_out_while_the_rest_arrives(fakes: tuple[FakeDevice, FakeDevice]) -> None:
    """A rising watermark starts the copies of what is below it, once; nothing above it is touched."""
    theirs = {"w": far(torch.zeros(4 * MIB, dtype=torch.uint8))}
    reader = reg(theirs)
    assert reader.on_device is not None
    delivery = reader.on_device.delivery(reader.on_device.mark(gather=False), lambda: 10.0)
    chunk = reader.manifest.chunk_bytes
    for watermark, crossed in ((3, 3), (3, 3), (10, 10)):
        delivery.reach(watermark)
        assert sum(nbytes for _, nbytes in fakes[0].copied) == crossed * chunk
    delivery.finish()
    assert sum(nbytes for _, nbytes in fakes[0].copied) == 4 * MIB


def test_nothing_is_written_before_what_the_caller_has_queued(fakes: tuple[FakeDevice, FakeDevice]) -> None:
    """A kernel that still reads the old weights when `replicate` is called reads the old weights."""
    theirs = {"w": far(torch.zeros(5000, dtype=torch.uint8))}
    poke(theirs["w"], b"\7" * 5000)
    seen: list[bytes] = []
    fakes[0].launch(lambda: seen.append(peek(theirs["w"])))
    reader = reg(theirs)
    assert reader.on_device is not None
    delivery = reader.on_device.delivery(reader.on_device.mark(gather=False), lambda: 10.0)
    reader.placement.staging.fill_(1)
    delivery.finish()
    assert seen == [b"\7" * 5000]
    assert peek(theirs["w"]) == b"\1" * 5000


def test_a_subset_updates_itself_and_nothing_else(fakes: tuple[FakeDevice, FakeDevice]) -> None:
    """subset_selection_exact: on a device, too."""
    flat = torch.arange(100_000.0)
    ours = {"flat": flat, "part": flat[50_000:60_000], "tiny.a": torch.ones(5), "tiny.b": torch.ones(5)}
    source = reg(ours)
    publish(source)
    theirs = {name: far(torch.zeros(tensor.shape)) for name, tensor in ours.items()}
    for only in (["part", "tiny.b"], ["tiny.a", "flat"]):
        for tensor in theirs.values():
            poke(tensor, bytes(tensor.nbytes))
        pull(source, reg(theirs).subset(only, source.manifest, HERE), 1, random.Random(1))
        for name, tensor in theirs.items():
            assert peek(tensor) == (peek(ours[name]) if name in only else bytes(tensor.nbytes)), (only, name)


def test_equal_addresses_of_two_devices_are_two_places(fakes: tuple[FakeDevice, FakeDevice]) -> None:
    """aba_same_pointer: a device's addresses are its own: no alias, no overlap with another's or the host's."""
    flat = torch.zeros(3000)
    held = reg({"a": far(flat, 0), "b": far(flat, 1), "c": flat[100:]})
    assert held.manifest.parent.tolist() == [-1, -1, -1]
    held.check_writable(HERE)
    tied = reg({"a": far(flat, 0), "b": far(flat, 0)})
    assert tied.manifest.parent.tolist() == [-1, 0]


def test_writes_on_a_device_are_noticed_by_their_counters(fakes: tuple[FakeDevice, FakeDevice]) -> None:
    """mutate_during_read: tiny tensors of a device count, too: comparing them would mean to wait for the device."""
    tensors = {"large": far(torch.zeros(5000)), "tiny": far(torch.zeros(3)), "near": torch.zeros(3)}
    held = reg(tensors)
    publish(held)
    before = held.counters()
    assert held.changed(before) == []
    for tensor in tensors.values():
        tensor.add_(1)
    assert held.changed(before) == ["large", "near", "tiny"]


def test_memory_that_cannot_be_pinned_is_refused_by_name(fakes: tuple[FakeDevice, FakeDevice]) -> None:
    """register_failure_is_fatal: the error names tensors, device, bytes and what to do."""
    fakes[0].unpinnable = "20016 bytes of pinned host memory: cudaHostRegister returned 2"
    with pytest.raises(UnsupportedTensor, match=rf"\['w'\] on {KIND}:0 cannot be staged: no 20016 bytes.*ulimit -l"):
        reg({"w": far(torch.zeros(5000)), "near": torch.zeros(3)})


def test_a_kind_of_device_that_nobody_knows_is_refused_by_name() -> None:
    """Other accelerators are no host memory: each tensor on one is named, with what can be done."""
    with pytest.raises(
        UnsupportedTensor, match=r"'w': on privateuseone:0: only host, cuda and npu memory can be moved"
    ):
        reg({"w": far(torch.zeros(50)), "fine": torch.zeros(3)})


DIRECT = frozenset({KIND})


def test_engines_that_read_devices_get_their_addresses(fakes: tuple[FakeDevice, FakeDevice]) -> None:
    """Nothing large and contiguous is staged then; its allocation is registered, and its digests, computed on the
    device, are those of the host."""
    torch.manual_seed(0)
    near = {
        "large": torch.randn(300_000), "odd": torch.randn(4099).view(torch.uint8)[:16_391], "tiny": torch.randn(7),
        "strided": torch.randn(80, 90).t(), "host": torch.randn(3000),
    }  # fmt: skip
    ours = {name: tensor if name == "host" else to_far(tensor) for name, tensor in near.items()}
    held = reg(ours, DIRECT)
    assert held.on_device is not None
    assert held.on_device.kinds == DIRECT
    assert held.staged_bytes < 30_000 + 64 * 4
    assert {ours["large"].data_ptr(), ours["odd"].data_ptr()} <= {address for address, _ in held.regions}
    assert publish(held).tolist() == publish(reg(near)).tolist()
    assert held.staged().staged_bytes > 1_200_000


def test_what_others_are_filled_from_is_staged_even_so(fakes: tuple[FakeDevice, FakeDevice]) -> None:
    """tied_once: a version that ties what lies apart here is filled from host memory, so its bytes pass there."""
    weight = torch.randn(5000)
    source = reg({"embed": weight, "head": weight})
    publish(source)
    theirs = {name: far(torch.zeros(5000)) for name in ("embed", "head")}
    reader = reg(theirs, DIRECT).adopt(source.manifest, HERE)
    pull(source, reader, MIB, random.Random(0))
    assert peek(theirs["embed"]) == peek(theirs["head"]) == peek(weight)


def test_memory_of_the_default_mode_and_of_inference_mode_are_alike(fakes: tuple[FakeDevice, FakeDevice]) -> None:
    """What is registered inside inference mode is copied outside of it, in threads of ours."""
    with torch.inference_mode():
        ours = {"w": to_far(torch.ones(5000)), "v": to_far(torch.ones(30, 50)).t().as_subclass(torch.Tensor)}
        ours["v"] = far(ours["v"])
        source = reg(ours)
        theirs = {"w": far(make((5000,), "float32", "plain")), "v": far(make((50, 30), "float32", "plain"))}
        reader = reg(theirs)
    publish(source)
    pull(source, reader, MIB, random.Random(0))
    assert peek(theirs["w"]) == peek(ours["w"])
    assert peek(theirs["v"]) == peek(ours["v"])
