"""The root digest: what a shard of a version is, in one value.

XXH3-64 per chunk, BLAKE2b-128 over all of them; docs/digest.md says why. Chunks are digested by `native.digest_runs`
where they lie, and by engines where they land.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from tensorhub.types import ID_BYTES, Digest

U64 = NDArray[np.uint64]


def root_digest(manifest: Digest, digests: U64) -> Digest:
    """What a shard of a version is, in one value: over the manifest's digest and every chunk's, in stream order."""
    content = manifest + digests.astype("<u8", copy=False).tobytes()
    return Digest(hashlib.blake2b(content, digest_size=ID_BYTES).digest())
