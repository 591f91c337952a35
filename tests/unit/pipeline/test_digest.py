"""Digests of chunks depend on the stream's bytes alone, wherever its runs lie."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub import native
from tensorhub.pipeline.digest import root_digest
from tensorhub.pipeline.memory_map import MemoryMap
from tensorhub.types import Digest


def lay_out(stream: bytes, cuts: list[int], order: list[int]):
    """The stream's runs, cut at `cuts`, scattered over one buffer in `order`: offsets, addresses, nbytes, buffer."""
    bounds = [0, *sorted(set(cuts)), len(stream)]
    runs = list(itertools.pairwise(bounds))
    memory = np.zeros(len(stream), dtype=np.uint8)
    at, addresses = 0, [0] * len(runs)
    for i in sorted(range(len(runs)), key=lambda i: order[i % len(order)]):
        start, stop = runs[i]
        memory[at : at + stop - start] = np.frombuffer(stream[start:stop], dtype=np.uint8)
        addresses[i] = memory.ctypes.data + at
        at += stop - start
    vectors = ([start for start, _ in runs], addresses, [stop - start for start, stop in runs])
    return *(np.array(vector, dtype=np.uint64) for vector in vectors), memory


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_digests_do_not_depend_on_the_layout(data):
    """chunk_size_invariance, noncontig_src: any cut into runs, any order in memory, any chunk edges, any sub-range."""
    stream = data.draw(st.binary(min_size=2, max_size=600))
    inside = st.integers(1, len(stream) - 1)
    cuts = data.draw(st.lists(inside, max_size=8))
    offsets, addresses, nbytes, _bytes = lay_out(stream, cuts, data.draw(st.permutations(range(10))))
    edges = [0, *sorted(set(data.draw(st.lists(inside, max_size=8)))), len(stream)]
    start = data.draw(st.integers(0, len(edges) - 1))
    stop = data.draw(st.integers(start, len(edges) - 1))
    out = np.zeros(stop - start, dtype=np.uint64)
    memory = MemoryMap(offsets, addresses, nbytes)
    native.digest_runs(*memory.chunk_runs(edges[start:stop], edges[start + 1 : stop + 1]), out)
    expected = [xxhash.xxh3_64_intdigest(stream[edges[c] : edges[c + 1]]) for c in range(start, stop)]
    assert out.tolist() == expected


def test_the_root_names_manifest_and_every_digest_in_order():
    """The root is BLAKE2b-128 of manifest digest and chunk digests as little-endian words: frozen format."""
    manifest, digests = Digest(bytes(range(16))), np.array([1, 2**63 + 5], dtype=np.uint64)
    content = bytes(range(16)) + (1).to_bytes(8, "little") + (2**63 + 5).to_bytes(8, "little")
    assert root_digest(manifest, digests) == hashlib.blake2b(content, digest_size=16).digest()
    assert root_digest(manifest, digests.astype(">u8")) == root_digest(manifest, digests)
    assert root_digest(manifest, digests[::-1]) != root_digest(manifest, digests)
