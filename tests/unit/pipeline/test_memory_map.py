"""Maps of a stream onto memory, and the plans that two of them make."""

from __future__ import annotations

import itertools

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub.errors import Broken, SourceFailed
from tensorhub.pipeline.memory_map import MemoryMap
from tensorhub.pipeline.plan import ranges


@st.composite
def maps(draw: st.DrawFn, stream_bytes: int) -> MemoryMap:
    """A map of a stream with runs anywhere, which do not overlap."""
    cuts = sorted(draw(st.sets(st.integers(1, stream_bytes - 1), max_size=12))) if stream_bytes > 1 else []
    sizes = np.diff([0, *cuts, stream_bytes]).tolist()
    places = draw(st.permutations(range(len(sizes))))
    return MemoryMap.tiled([(1 + place) * 10_000 for place in places], sizes)


def address_of(memory: MemoryMap, offset: int) -> int:
    """The dumb twin: where one byte of the stream lies."""
    for start, address, nbytes in zip(memory.offsets, memory.addresses, memory.nbytes, strict=True):
        if start <= offset < start + nbytes:
            return int(address) + offset - int(start)
    raise AssertionError(f"no place for {offset}")


@pytest.mark.slow
@settings(deadline=None)
@given(data=st.data(), stream_bytes=st.integers(1, 300))
def test_a_plan_brings_each_byte_from_its_place_to_its_place(data: st.DataObject, stream_bytes: int) -> None:
    """every_byte_written_once, chunk_size_invariance: byte by byte, a plan is what looking each one up gives."""
    source, destination = data.draw(maps(stream_bytes)), data.draw(maps(stream_bytes))
    start = data.draw(st.integers(0, stream_bytes))
    stop = data.draw(st.integers(start, stream_bytes))
    plan = ranges(source, destination, start, stop)
    pairs = [
        (remote + i, local + i)
        for remote, local, nbytes in zip(*(c.tolist() for c in (plan.remote, plan.local, plan.nbytes)), strict=True)
        for i in range(nbytes)
    ]
    assert pairs == [(address_of(source, i), address_of(destination, i)) for i in range(start, stop)]
    assert plan.nbytes.all()


@pytest.mark.slow
@settings(deadline=None)
@given(data=st.data(), stream_bytes=st.integers(1, 300))
def test_chunk_runs_group_the_runs_of_each_chunk(data: st.DataObject, stream_bytes: int) -> None:
    """What is digested for a chunk is that chunk's bytes in order."""
    memory = data.draw(maps(stream_bytes))
    edges = [0, *sorted(data.draw(st.sets(st.integers(1, max(1, stream_bytes - 1)), max_size=5))), stream_bytes]
    edges = sorted(set(edges))
    addresses, nbytes, firsts = memory.chunk_runs(edges[:-1], edges[1:])
    assert firsts.tolist()[0] == 0
    assert firsts.tolist()[-1] == len(addresses)
    for c, (start, stop) in enumerate(itertools.pairwise(edges)):
        span = slice(int(firsts[c]), int(firsts[c + 1]))
        flat = [int(a) + i for a, n in zip(addresses[span], nbytes[span], strict=True) for i in range(int(n))]
        assert flat == [address_of(memory, i) for i in range(start, stop)]
        assert [x.tolist() for x in memory.slice_runs(start, stop)] == [addresses[span].tolist(), nbytes[span].tolist()]


def test_a_gap_on_either_side_is_our_fault_and_seen() -> None:
    """every_byte_written_once: no plan leaves a byte out silently, within the map or beyond its end."""
    whole = MemoryMap.tiled([1000], [100])
    gap = MemoryMap(*(np.array(c, dtype=np.uint64) for c in ([0, 60], [1000, 2000], [50, 40])))
    for source, destination in ((whole, gap), (gap, whole)):
        assert ranges(source, destination, 0, 50).total_bytes == 50
        with pytest.raises(Broken, match="have a place in memory"):
            ranges(source, destination, 0, 100)
        with pytest.raises(Broken, match="have a place in memory"):
            ranges(source, destination, 50, 60)
    with pytest.raises(Broken, match="have a place in memory"):
        ranges(whole, whole, 90, 101)
    with pytest.raises(Broken, match="gaps"):
        gap.encode()


def test_the_encoding_is_frozen() -> None:
    """Golden bytes: version 1 of the memory map."""
    memory = MemoryMap.tiled([0x1000, 0x9000], [16, 300])
    assert memory.encode().hex() == (
        "94a854484d454d41503101c41000100000000000000090000000000000c41010000000000000002c01000000000000"
    )
    again = MemoryMap.decode(memory.encode(), 316)
    assert (again.offsets.tolist(), again.ends.tolist()) == ([0, 16], [16, 316])
    assert len(MemoryMap.decode(MemoryMap.tiled([], []).encode(), 0).offsets) == 0


def _packed(addresses: list[int], nbytes: list[int]) -> bytes:
    columns = [np.array(column, dtype="<u8").tobytes() for column in (addresses, nbytes)]
    return bytes(msgpack.packb(["THMEMAP1", 1, *columns]))


HOSTILE = {
    "nothing": b"",
    "format": msgpack.packb(["THMEMAP1", 2, b"", b""]),
    "fields": msgpack.packb(["THMEMAP1", 1, b""]),
    "types": msgpack.packb(["THMEMAP1", 1, 5, b""]),
    "odd bytes": msgpack.packb(["THMEMAP1", 1, b"abc", b"abc"]),
    "lengths": _packed([4096], [50, 50]),
    "empty": _packed([], []),
    "short": _packed([4096], [99]),
    "long": _packed([4096], [101]),
    "empty run": _packed([4096, 8192], [100, 0]),
    "null": _packed([0], [100]),
    "end of memory": _packed([2**64 - 10], [100]),
    "sum wraps": _packed([4096] * 3, [2**63, 2**63, 100]),
    "trailing": _packed([4096], [100]) + b"\0",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_maps_are_refused(kind: str) -> None:
    """A peer's map tiles the stream exactly, within memory, or the peer is not a source."""
    with pytest.raises(SourceFailed, match="memory map"):
        MemoryMap.decode(HOSTILE[kind], 100)


@pytest.mark.slow
@settings(deadline=None)
@given(data=st.data())
def test_mutated_maps_are_refused_or_tile_the_stream(data: st.DataObject) -> None:
    """Any change of bytes is a named error, or a map that covers every byte of the stream once."""
    mutated = bytearray(_packed([4096, 9000, 123_456], [16, 300, 5]))
    for _ in range(data.draw(st.integers(1, 3))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    try:
        memory = MemoryMap.decode(bytes(mutated), 321)
    except SourceFailed:
        return
    assert memory.encode() == bytes(mutated)
    assert int(memory.slice_runs(0, 321)[1].sum()) == 321
