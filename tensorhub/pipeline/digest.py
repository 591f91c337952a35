"""Digests of a stream's chunks from memory as it lies, and the root digest over all of them.

XXH3-64 per chunk, BLAKE2b-128 for what names a whole version (docs/digest.md says why). Takes arrays: where runs and
chunk edges come from is decided by memory map and manifest.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from tensorhub import native
from tensorhub.errors import BadRequest
from tensorhub.types import ID_BYTES, Digest

U64 = NDArray[np.uint64]


def digest_chunks(offsets: U64, addresses: U64, nbytes: U64, edges: U64, *, start: int, stop: int, out: U64) -> None:
    """Digests of chunks `start` to `stop` into `out[:stop - start]`, without the interpreter while it reads.

    Run i holds the stream's bytes from `offsets[i]`, `nbytes[i]` of them, at `addresses[i]`; runs tile the stream in
    order. Chunk c is the stream's bytes from `edges[c]` to `edges[c + 1]`.
    """
    if not 0 <= start <= stop < len(edges):
        raise BadRequest(f"chunks {start} to {stop} are not among {len(edges) - 1}")
    if start == stop:
        return
    if len(offsets) == 0 or edges[stop] > offsets[-1] + nbytes[-1]:
        raise BadRequest(f"the runs end before chunk {stop - 1} does, at {edges[stop]}")
    wanted = edges[start : stop + 1]
    first, last = np.searchsorted(offsets, wanted[0], "right"), np.searchsorted(offsets, wanted[-1], "left")
    cuts = np.union1d(wanted, offsets[first:last])
    pieces = cuts[:-1]
    run = np.searchsorted(offsets, pieces, "right") - 1
    native.digest_runs(
        addresses[run] + (pieces - offsets[run]),
        np.diff(cuts),
        np.searchsorted(cuts, wanted).astype(np.uint64),
        out[: stop - start],
    )


def root_digest(manifest: Digest, digests: U64) -> Digest:
    """What a shard of a version is, in one value: over the manifest's digest and every chunk's, in stream order."""
    content = manifest + digests.astype("<u8", copy=False).tobytes()
    return Digest(hashlib.blake2b(content, digest_size=ID_BYTES).digest())
