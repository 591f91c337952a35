"""A plan as an engine that follows by itself takes it: each chunk's digest behind its bytes.

What a source may overwrite while it is read, it has withdrawn before. So who sees its generation between the bytes and
their digest knows that the bytes are those that were granted; a digest of what came later does not match them.

Pure: decides the order in which bytes are asked for, reads nothing.
"""

from __future__ import annotations

import numpy as np

from tensorhub.pipeline.exposure import DIGEST_BYTES, HEADER_BYTES
from tensorhub.pipeline.plan import Plan
from tensorhub.ports import TOLD_WORDS, U64, Course, Ranges
from tensorhub.types import Generation

#: The word of `Course.told` that counts what landed.
LANDED_BYTES = 2


def lay(
    plan: Plan, source_block: int, generation: Generation, own_block: int, digests: U64, *, verified: bool
) -> Course:
    """The chunks of the plan. The source's digests land in `digests`, one slot for each chunk of the stream."""
    counts = np.diff(plan.firsts)
    numbers = np.flatnonzero(counts).astype(np.uint64)
    reads, counts = plan.reads, counts[numbers.astype(np.int64)]
    if verified:
        # An engine that does nothing and reports success must find no digest that its bytes match.
        digests[numbers] = 0
        reads = _with_digests(reads, plan.firsts[numbers.astype(np.int64) + 1], numbers, source_block, digests)
        counts = counts + np.uint64(1)
    return Course(
        reads,
        np.concatenate((np.zeros(1, dtype=np.uint64), np.cumsum(counts, dtype=np.uint64))),
        numbers,
        len(plan.firsts) - 1,
        verified,
        source_block,
        generation,
        own_block,
        np.zeros(len(numbers), dtype=np.uint8),
        np.zeros(TOLD_WORDS, dtype=np.uint64),
    )


def _with_digests(reads: Ranges, places: U64, numbers: U64, source_block: int, digests: U64) -> Ranges:
    remote = np.uint64(source_block + HEADER_BYTES) + numbers * np.uint64(DIGEST_BYTES)
    local = np.uint64(digests.ctypes.data) + numbers * np.uint64(DIGEST_BYTES)
    sizes = np.full(len(numbers), DIGEST_BYTES, dtype=np.uint64)
    at = places.astype(np.int64)
    columns = zip((reads.remote, reads.local, reads.nbytes), (remote, local, sizes), strict=True)
    return Ranges(*(np.insert(column, at, more) for column, more in columns))
