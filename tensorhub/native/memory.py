"""Digests and copies of this process's own memory, without the interpreter.

Addresses are the caller's promise: what is read or written must be mapped and stay so. Arrays are checked, memory is
not. Everything is uint64.
"""

from __future__ import annotations

import errno

import numpy as np
from numpy.typing import NDArray

from tensorhub.errors import BadRequest, Broken
from tensorhub.native.binding import address_of, library

U64 = NDArray[np.uint64]

#: The largest chunk of several runs: what C gathers before it digests. Equals SCRATCH_BYTES_MAX in tensorhub.h.
SCRATCH_BYTES_MAX = 8 << 20
#: Chunks done, and whether to end.
PROGRESS_WORDS = 2


def digest(address: int, nbytes: int) -> int:
    """XXH3-64, seed 0."""
    return int(library().th_digest(address, nbytes))


def digest_runs(addresses: U64, nbytes: U64, firsts: U64, out: U64, progress: U64 | None = None) -> None:
    """Digest of each chunk c, which is runs `firsts[c]` to `firsts[c + 1]`, into `out[c]`, in order.

    A chunk of one run is digested in place; one of several is gathered first, and then at most `SCRATCH_BYTES_MAX`.
    `progress` is two words that other threads may look at meanwhile, without the interpreter's help to this one: the
    first counts the chunks whose digests are in place; who sets the second ends the work before the next chunk.
    """
    chunks, runs = len(out), len(addresses)
    places = (
        address_of("addresses", addresses),
        address_of("nbytes", nbytes, runs),
        address_of("firsts", firsts, chunks + 1),
    )
    target = writable("out", out)
    told = None if progress is None else writable("progress", progress)
    if progress is not None and len(progress) != PROGRESS_WORDS:
        raise BadRequest(f"progress has {PROGRESS_WORDS} words, not {len(progress)}")
    if firsts[0] != 0 or firsts[-1] != runs or (firsts[1:] <= firsts[:-1]).any():
        raise BadRequest(f"firsts must rise from 0 to {runs}, the number of runs")
    match library().th_digest_runs(*places, chunks, target, told):
        case 0:
            return
        case errno.ENOMEM:
            raise MemoryError("no memory to gather a chunk for its digest")
        case errno.EMSGSIZE:
            raise BadRequest(f"a chunk of several runs is larger than {SCRATCH_BYTES_MAX} bytes")
        case other:
            raise Broken(f"digest_runs returned {other}")


def copy(destination: int, source: int, nbytes: int) -> None:
    """Copy one range; the two may overlap."""
    library().th_copy(destination, source, nbytes)


def copy_ranges(sources: U64, destinations: U64, nbytes: U64) -> None:
    """Copy `nbytes[i]` bytes from `sources[i]` to `destinations[i]`, in order; no source overlaps its destination."""
    n = len(nbytes)
    library().th_copy_ranges(
        address_of("sources", sources, n),
        address_of("destinations", destinations, n),
        address_of("nbytes", nbytes),
        n,
    )


def differing(left: U64, right: U64, nbytes: U64) -> NDArray[np.int64]:
    """Indices of the ranges whose bytes differ: `nbytes[i]` bytes at `left[i]` and at `right[i]`."""
    n = len(nbytes)
    differs = np.zeros(n, dtype=np.uint8)
    library().th_compare_ranges(
        address_of("left", left, n), address_of("right", right, n), address_of("nbytes", nbytes), n, differs.ctypes.data
    )
    return np.flatnonzero(differs)


def gather(addresses: U64, nbytes: U64, offsets: U64, destination: int) -> None:
    """Copy `nbytes[i]` bytes from `addresses[i]` to `destination + offsets[i]`."""
    address_of("offsets", offsets)
    copy_ranges(addresses, offsets + np.uint64(destination), nbytes)


def scatter(source: int, offsets: U64, addresses: U64, nbytes: U64) -> None:
    """Copy `nbytes[i]` bytes from `source + offsets[i]` to `addresses[i]`."""
    address_of("offsets", offsets)
    copy_ranges(offsets + np.uint64(source), addresses, nbytes)


def store(destination: int, data: bytes) -> None:
    """Copy `data` after a release fence: whoever sees these bytes sees everything that was written before."""
    if not isinstance(data, bytes):
        raise BadRequest(f"store takes bytes, not {type(data).__name__}")
    library().th_store(destination, data, len(data))


def writable(name: str, array: U64) -> int:
    """Address of a dense uint64 vector that may be written."""
    address = address_of(name, array)
    if not array.flags.writeable:
        raise BadRequest(f"{name} is read-only")
    return address
