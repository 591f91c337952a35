"""Digests of chunks that have just landed, for engines that cannot compute them on the way."""

from __future__ import annotations

from tensorhub import native
from tensorhub.ports import Chunks, Ranges


def digest_landed(ranges: Ranges, chunks: Chunks) -> None:
    """Write the digest of each chunk, from local memory. Blocks for as long as memory takes; touches no event loop."""
    if len(chunks.digests):
        last = int(chunks.firsts[-1])
        native.digest_runs(ranges.local[:last], ranges.nbytes[:last], chunks.firsts, chunks.digests)
