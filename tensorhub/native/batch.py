"""The vectors of a batch as C takes them: checked here once, for every way of reading."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tensorhub.errors import BadRequest
from tensorhub.native.binding import address_of
from tensorhub.native.memory import writable

U64 = NDArray[np.uint64]


def batch_arguments(
    remote: U64, local: U64, nbytes: U64, firsts: U64 | None, digests: U64 | None
) -> tuple[int | None, ...]:
    """Addresses and lengths in the order of `th_batch_open`; whoever passes them on keeps the arrays alive.

    Chunks are there when `firsts` is: with `digests` they are written there, without they are followed.
    """
    n = len(nbytes)
    places = (address_of("remote", remote, n), address_of("local", local, n), address_of("nbytes", nbytes))
    if n == 0 or not nbytes.all():
        raise BadRequest("a read has at least one range, and no range is empty")
    chunks: tuple[int | None, int | None, int] = (None, None, 0)
    if firsts is not None and len(firsts) > 1:
        count = len(firsts) - 1
        if digests is not None and len(digests) != count:
            raise BadRequest(f"digests has {len(digests)} elements, expected {count}")
        written = None if digests is None else writable("digests", digests)
        chunks = (address_of("firsts", firsts), written, count)
        if firsts[0] != 0 or firsts[-1] > n or (firsts[1:] <= firsts[:-1]).any():
            raise BadRequest(f"firsts must rise from 0 to at most {n}, the number of ranges")
    return (*places, n, *chunks)
