"""What a version is: the layout of its stream, its chunks, its bytes, and everything that is no manifest."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub.errors import Broken, LayoutMismatch, SourceFailed
from tensorhub.pipeline import columns as limits
from tensorhub.pipeline.manifest import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, TINY_BYTES, Manifest, chunk_size


def small() -> Manifest:
    """Two tiny tensors, two large ones, an alias, a scalar and one without elements."""
    return Manifest.build(
        ["w.b", "w.a", "tiny", "part", "zero", "scalar"],
        ["float32", "bfloat16", "uint8", "float32", "float32", "int64"],
        [(200, 600), (5000,), (5,), (600,), (0, 3), ()],
        [480_000, 10_000, 5, 2400, 0, 8],
        [-1, -1, -1, 0, -1, -1],
        [0, 0, 0, 2400, 0, 0],
    )


#: The format, version 1. A change here is a change that older readers cannot read: raise FORMAT instead.
GOLDEN = (
    "9aa854484d414e494631"
    "01"
    "96a470617274a67363616c6172a474696e79a3772e61a3772e62a47a65726f"
    "9492a7666c6f617433320492a5696e7436340892a575696e74380192a862666c6f6174313602"
    "c40c000001000200030000000000"
    "9691cd025890910591cd138892ccc8cd0258920003"
    "c418000000000100000002000000030000000400000005000000"
    "c40400000000"
    "c40404000000"
    "c4086009000000000000"
)


def test_the_encoding_is_frozen() -> None:
    """Golden bytes: version 1 of the manifest is these bytes, and they decode to what they were."""
    data = bytes.fromhex(GOLDEN)
    assert small().encode().hex() == data.hex()
    assert small().digest.hex() == "54b4deec67928bb074e9fb2bb152d27c"
    assert Manifest.decode(data).encode() == data


def test_the_stream_is_tiny_segment_then_large_tensors() -> None:
    """mixed_dtype_alignment, zero_dim, zero_size_tensor: tiny entries at multiples of 16, padded; large ones back to
    back; aliases within their parents; nothing for entries without elements."""
    manifest = small()
    assert manifest.names == ["part", "scalar", "tiny", "w.a", "w.b", "zero"]
    assert manifest.stream_offset.tolist() == [32 + 10_000 + 2400, 0, 16, 32, 10_032, 0]
    assert (manifest.tiny_bytes, manifest.stream_bytes) == (32, 490_032)
    assert manifest.parent.tolist() == [4, -1, -1, -1, -1, -1]


def test_chunks_never_cross_the_edge_of_a_large_tensor() -> None:
    """slice_boundary, tensor_larger_than_chunk: the tiny segment and each large tensor are chunked on their own."""
    manifest = small()
    assert manifest.chunk_bytes == CHUNK_BYTES_MIN
    inner = [10_032 + CHUNK_BYTES_MIN * i for i in range(1, 8)]
    assert manifest.chunk_ends.tolist() == [32, 10_032, *inner, 490_032]
    assert manifest.chunk_starts.tolist() == [0, 32, 10_032, *inner]


@pytest.mark.parametrize(
    ("stream_bytes", "expected"),
    [
        (0, CHUNK_BYTES_MIN),
        (CHUNK_BYTES_MIN * 1024, CHUNK_BYTES_MIN),
        (CHUNK_BYTES_MIN * 1024 + 1, 2 * CHUNK_BYTES_MIN),
        (CHUNK_BYTES_MAX * 1024, CHUNK_BYTES_MAX),
        (CHUNK_BYTES_MAX * 1024 + 1, CHUNK_BYTES_MAX),
    ],
)
def test_chunk_bytes_follow_the_shard(stream_bytes: int, expected: int) -> None:
    """About 1024 chunks, between 64 KiB and 8 MiB, a power of two."""
    assert chunk_size(stream_bytes) == expected


@pytest.mark.slow
@given(sizes=st.lists(st.integers(0, 300_000), max_size=12))
def test_the_stream_is_tiled_by_chunks_and_entries(sizes: list[int]) -> None:
    """every_byte_written_once: entries do not overlap, chunks tile the stream, and each entry names its own bytes."""
    names = [f"{i:02}" for i in range(len(sizes))]
    manifest = Manifest.build(names, ["int8"] * len(sizes), [(n,) for n in sizes], sizes)
    starts, ends = manifest.chunk_starts.tolist(), manifest.chunk_ends.tolist()
    assert starts == ([0, *ends[:-1]] if ends else [])
    assert (ends[-1] if ends else 0) == manifest.stream_bytes
    assert all(0 < end - start <= manifest.chunk_bytes for start, end in zip(starts, ends, strict=True))
    place = 0
    for i in manifest.own:
        offset, nbytes = int(manifest.stream_offset[i]), int(manifest.nbytes[i])
        assert place <= offset < place + 16
        assert manifest.tensor_at(offset) == manifest.tensor_at(offset + nbytes - 1) == names[i]
        place = offset + nbytes
    large = sum(n for n in sizes if n > TINY_BYTES)
    assert manifest.stream_bytes == large + sum(-(-n // 16) * 16 for n in sizes if n <= TINY_BYTES)


def test_progress_is_counted_in_entries() -> None:
    """An entry is done when its last byte is below the watermark; aliases with their part of the parent."""
    manifest = small()
    assert [manifest.entries_done(w) for w in (0, 1, 2, 3, manifest.chunks)] == [1, 3, 4, 5, 6]
    with pytest.raises(Broken, match="outside the stream"):
        manifest.tensor_at(manifest.stream_bytes)


def test_differences_lists_all_by_name() -> None:
    """shape_mismatch_early, dtype_mismatch_early, dest_without_source, source_without_dest: both sides of each one."""
    here = Manifest.build(["a", "b", "c", "d"], ["int8"] * 4, [(6,), (2, 3), (4,), ()], [6, 6, 4, 1])
    there = Manifest.build(
        ["a", "b", "c", "e"], ["int8", "int8", "int16", "int8"], [(6,), (3, 2), (5,), ()], [6, 6, 10, 1]
    )
    assert here.differences(there) == [
        "'b': shape (2, 3) here, (3, 2) there",
        "'c': shape (4) here, (5) there",
        "'c': dtype int8 here, int16 there",
        "'d': missing there",
        "'e': missing here",
    ]
    assert here.differences(Manifest.decode(here.encode())) == []


@pytest.mark.parametrize("only", [None, ["a", "b"]])
def test_elements_of_another_size_are_a_difference(only: list[str] | None) -> None:
    """A peer's manifest of equal names, shapes and dtypes, whose dtype has wider elements, fits no tensor here: its
    bytes would be written beyond them."""
    here = Manifest.build(["a", "b"], ["float32", "int8"], [(3,), (2,)], [12, 2])
    there = Manifest.build(["a", "b"], ["float32", "int8"], [(3,), (2,)], [24, 2])
    assert here.differences(there, only) == ["'a': 12 bytes here, 24 there, as float32"]


BAD_COLUMNS = {
    "twice": (["a", "a"], ["int8"] * 2, [(1,)] * 2, [1, 1], None, None),
    "long": (["a" * 1025], ["int8"], [(1,)], [1], None, None),
    "lengths": (["a"], ["int8"] * 2, [(1,)], [1], None, None),
    "no item": (["a"], ["int8"], [(3,)], [4], None, None),
    "two items": (["a", "b"], ["int8"] * 2, [(2,), (2,)], [2, 4], None, None),
    "wide item": (["a"], ["int8"], [(2,)], [64], None, None),
    "empty": (["a"], ["int8"], [(0,)], [1], None, None),
    "negative": (["a"], ["int8"], [(-1,)], [1], None, None),
    "huge": (["a"], ["int8"], [(1 << 45,)], [1 << 45], None, None),
    "huge sum": (["a", "b"], ["int8"] * 2, [(1 << 44,)] * 2, [1 << 44] * 2, None, None),
    "wraps": (["a"], ["int8"], [(1 << 33, 1 << 33)], [4], None, None),
    "rank": (["a"], ["int8"], [(1,) * 65], [1], None, None),
    "no parent": (["a"], ["int8"], [(1,)], [1], [1], [0]),
    "own parent": (["a"], ["int8"], [(1,)], [1], [0], [0]),
    "chain": (["a", "b", "c"], ["int8"] * 3, [(1,)] * 3, [1] * 3, [-1, 0, 1], [0, 0, 0]),
    "beyond": (["a", "b"], ["int8"] * 2, [(2,), (2,)], [2, 2], [-1, 0], [0, 1]),
    "beyond, wrapped": (["a", "b"], ["int8"] * 2, [(2,), (2,)], [2, 2], [-1, 0], [0, 2**64 - 1]),
    "empty alias": (["a", "b"], ["int8"] * 2, [(2,), (0,)], [2, 0], [-1, 0], [0, 0]),
    "stray offset": (["a"], ["int8"], [(2,)], [2], [-1], [1]),
    "dtype name": (["a"], [""], [(1,)], [1], None, None),
}


@pytest.mark.parametrize("kind", BAD_COLUMNS)
def test_columns_that_make_no_version_are_refused(kind: str) -> None:
    """Sizes, limits and aliases are checked whoever made them."""
    with pytest.raises(LayoutMismatch, match="make no version"):
        Manifest.build(*BAD_COLUMNS[kind])


def _edited(field: int, value: object) -> bytes:
    fields = msgpack.unpackb(small().encode())
    fields[field] = value
    return bytes(msgpack.packb(fields))


HOSTILE = {
    "nothing": b"",
    "truncated": small().encode()[:-1],
    "trailing": small().encode() + b"\0",
    "no list": msgpack.packb({"a": 1}),
    "other format": _edited(1, 2),
    "fields": msgpack.packb([limits.MAGIC, 1, []]),
    "names unsorted": _edited(2, ["w.b", "scalar", "tiny", "w.a", "w.b", "zero"]),
    "name no text": _edited(2, [1, 2, 3, 4, 5, 6]),
    "dtype twice": _edited(3, [["float32", 4], ["int64", 8], ["float32", 4], ["bfloat16", 2]]),
    "dtype unused": _edited(3, [["float32", 4], ["int64", 8], ["uint8", 1], ["bfloat16", 2], ["int8", 1]]),
    "dtype size": _edited(3, [["float32", 1 << 60], ["int64", 8], ["uint8", 1], ["bfloat16", 2]]),
    "dtype index": _edited(4, b"\xff\xff" * 6),
    "shape index": _edited(6, b"\xff\xff\xff\xff" * 6),
    "shape bool": _edited(5, [[600], [], [True], [5000], [200, 600], [0, 3]]),
    "shape huge": _edited(5, [[600], [], [1 << 62], [5000], [200, 600], [0, 3]]),
    "shape negative": _edited(5, [[600], [], [-5], [5000], [200, 600], [0, 3]]),
    "alias index": _edited(7, b"\xff\0\0\0"),
    "alias parent": _edited(8, b"\xff\0\0\0"),
    "alias offset": _edited(9, b"\xff" * 8),
    "alias column": _edited(9, b""),
    "depth": b"\x91" * 5000,
    "promised": b"\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_manifests_are_refused(kind: str) -> None:
    """Nothing but what `encode` writes is accepted: no overflow, no dangling index, no second spelling."""
    with pytest.raises(SourceFailed, match="manifest"):
        Manifest.decode(HOSTILE[kind])


@pytest.mark.slow
@settings(deadline=None)
@given(data=st.data())
def test_mutated_bytes_are_refused_or_mean_what_they_say(data: st.DataObject) -> None:
    """Any change of bytes is a named error, or another manifest whose bytes are exactly these."""
    mutated = bytearray(small().encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        mutated[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    try:
        manifest = Manifest.decode(bytes(mutated))
    except SourceFailed:
        return
    assert manifest.encode() == bytes(mutated)
    assert manifest.chunks <= len(mutated) + (limits.STREAM_BYTES_MAX // CHUNK_BYTES_MAX)


@pytest.mark.slow
def test_the_largest_claim_costs_bounded_memory() -> None:
    """A few hostile bytes claim at most 16 TiB, whose chunk table is 16 MiB."""
    manifest = Manifest.build(["a"], ["int8"], [(limits.STREAM_BYTES_MAX,)], [limits.STREAM_BYTES_MAX])
    assert manifest.chunk_ends.nbytes == 16 << 20
    assert manifest.chunk_ends[-1] == np.uint64(limits.STREAM_BYTES_MAX)
